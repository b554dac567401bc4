"""Storage of rows: streams, their layout and arrays, episodes, and the set of sampleable rows."""
