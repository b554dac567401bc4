"""Check the built pages in headless Chromium, at three widths: no code is cut, no page is wider
than its screen, and no figure stands as text. `make pages` runs it."""

import pathlib
import shutil
import sys

from selenium import webdriver

PAGES = pathlib.Path(__file__).parent.parent / "out" / "docs"
WIDTHS = (390, 1300, 1920)
# Programs and what they print are cut where they are wider than their box.
FAULTS = """
const found = [];
const wide = document.documentElement.scrollWidth;
if (wide > window.innerWidth + 1) found.push(`is ${wide} wide`);
if (document.body.innerText.includes("<Figure size")) found.push("has a figure as text");
for (const pre of document.querySelectorAll("article pre"))
  if (pre.scrollWidth > pre.clientWidth + 1) found.push(`cuts ${pre.innerText.slice(0, 60)}`);
return found;
"""


def main():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    faults = []
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options, service) as browser:
        for width in WIDTHS:
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 1000}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            for page in sorted(PAGES.rglob("*.html")):
                browser.get(page.as_uri())
                found = browser.execute_script(FAULTS)
                faults += [f"{page.relative_to(PAGES)} at {width}: {fault}" for fault in found]
    sys.stdout.write("\n".join([*faults, f"{len(faults)} faults\n"]))
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
