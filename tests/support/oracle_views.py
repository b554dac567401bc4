"""Expected items of each view, read from the oracle's lists one row at a time."""


def spans(oracle, rows):
    """Return (first, last or None), indices in the list, of each row's episode; None for a final
    row that begins an episode."""
    has_tails = oracle.autoreset != "same_step_no_final_obs"
    found, first = [], 0
    for index, row in enumerate(rows):
        if row.is_final and index == first:
            found.append(None)
            first = index + 1
        elif row.is_final or row.is_closed or (row.terminated and not has_tails):
            found += [(first, index)] * (index + 1 - first)
            first = index + 1
    return found + [(first, None)] * (len(rows) - first)


def anchors(
    oracle,
    *,
    before=0,
    after=0,
    crosses_episodes=False,
    period=1,
    needs_final_obs=False,
    needs_next_obs=True,
):
    """Yield (env, position, index) of every candidate. `before` or `after` of None: back to the
    episode's beginning, or on to its end."""
    for env, rows in enumerate(oracle.streams):
        episode = spans(oracle, rows)
        oldest = max(0, len(rows) - oracle.length)
        for position, index in oracle.stored(env):
            if rows[index].is_final and (needs_next_obs or not has_action(rows[index])):
                continue
            first, last = episode[index] or (index, index)
            begin = 0 if crosses_episodes else first
            before_it = rows[begin:index] if period > 1 else ()
            place = sum(not row.is_final or row.is_dropped for row in before_it)
            is_whole_before = (first if before is None else max(first, index - before)) >= oldest
            if after is None:
                is_whole_after = last is not None
            else:
                is_whole_after = index + after < len(rows) or (
                    not crosses_episodes
                    and reaches_end(rows, index, after, needs_final_obs, needs_next_obs)
                )
            if place % period == 0 and is_whole_before and is_whole_after:
                yield env, position, index


def has_action(row):
    """Return whether a row has an action, which a truncated final row may have."""
    return not row.is_final or (row.truncated and not row.is_dropped)


def reaches_end(rows, index, after, needs_final_obs, needs_next_obs):
    """Return whether the episode's end is known, and within `after` rows."""
    ahead = enumerate(rows[index : index + after + 1])
    return any(
        row.is_final
        or (row.terminated and k < after and not needs_final_obs)
        or (row.truncated and k < after and not needs_next_obs)
        for k, row in ahead
    )


def chunk(oracle, env, index, offsets):
    """Return the row at each offset, or the episode's first or last step, and which are that."""
    rows = oracle.streams[env]
    first, last = spans(oracle, rows)[index] or (index, index)
    last = len(rows) - 1 if last is None else last
    steps = [at for at in range(first, last + 1) if has_action(rows[at])]
    near = [min(max(index + offset, steps[0]), steps[-1]) for offset in offsets]
    return [rows[at] for at in near], [at != index + k for at, k in zip(near, offsets, strict=True)]


def sequence(oracle, env, index, *, length, burn_in, cross_episodes):
    """Return a dict for each step, from `burn_in` steps before the candidate to the observation
    after the last step; None where there is no row."""
    rows = oracle.streams[env]
    episode = spans(oracle, rows)
    first, last = episode[index]
    steps = []
    for offset in range(-burn_in, length + 1):
        at = index + offset
        is_here = (
            at >= first
            if offset < 0
            else at < len(rows) and (cross_episodes or last is None or at <= last)
        )
        if not is_here:
            steps.append(None)
            continue
        row = rows[at]
        opens = (episode[at] or (at,))[0] == at and not (at == 0 and oracle.began_with_a_tail[env])
        steps.append(
            {
                "row": row,
                "is_first": opens,
                "is_step": not row.is_final,
                "learns": offset >= 0 and not row.is_final,
            }
        )
    return steps


def stack(oracle, env, index, num_frames, pad):
    """Return the observations of a stack that ends at a row, the oldest first; None for a frame of
    zeros."""
    rows = oracle.streams[env]
    episode = spans(oracle, rows)
    first = index if episode[index] is None else episode[index][0]
    blank = None if pad == "zero" else rows[first].obs
    return [
        rows[at].obs if at >= first else blank for at in range(index - num_frames + 1, index + 1)
    ]


def horizon(oracle, env, index, max_terminals=None):
    """Return the number of rows from a row to the farthest one that may be sampled with it."""
    rows = oracle.streams[env]
    episode = spans(oracle, rows)
    if max_terminals is None:
        last = episode[index][1]
        return (len(rows) - 1 if last is None else last) - index
    ends = sorted(
        {span[1] for span in episode[index:] if span and span[1] is not None and span[1] > index}
    )
    return (ends[min(max_terminals, len(ends)) - 1] if ends else len(rows) - 1) - index
