"""What each view must read, from the oracle's lists of rows: by walking them, one row at a time."""


def spans(oracle, rows):
    """(first, last or None) of each row's episode, as places in the list; None for a final row that
    opens one."""
    has_tails = oracle.autoreset != "same_step_no_final_obs"
    found, first = [], 0
    for index, row in enumerate(rows):
        if row.is_final and index == first:
            found.append(None)
            first = index + 1
        elif row.is_final or (row.terminated and not has_tails):
            found += [(first, index)] * (index + 1 - first)
            first = index + 1
    return found + [(first, None)] * (len(rows) - first)


def anchors(oracle, *, before=0, after=0, crosses_episodes=False, period=1, needs_final_obs=False):
    """(env, position, index) of every sampleable row; `before` and `after` None: the whole
    episode."""
    for env, rows in enumerate(oracle.streams):
        episode = spans(oracle, rows)
        oldest = max(0, len(rows) - oracle.length)
        for position, index in oracle.stored(env):
            if rows[index].is_final:
                continue
            first, last = episode[index]
            begin = 0 if crosses_episodes else first
            place = sum(not row.is_final for row in rows[begin:index])
            is_whole_before = (first if before is None else max(first, index - before)) >= oldest
            if after is None:
                is_whole_after = last is not None
            else:
                is_whole_after = index + after < len(rows) or (
                    not crosses_episodes and reaches_end(rows, index, after, needs_final_obs)
                )
            if place % period == 0 and is_whole_before and is_whole_after:
                yield env, position, index


def reaches_end(rows, index, after, needs_final_obs):
    """Whether the episode's end is known, and within `after` rows."""
    ahead = enumerate(rows[index : index + after + 1])
    return any(
        row.is_final or (row.terminated and k < after and not needs_final_obs) for k, row in ahead
    )


def sequence(oracle, env, index, *, length, burn_in, cross_episodes):
    """One dict a step, from `burn_in` steps before the candidate on to the observation after the
    last step; None where nothing is."""
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
    """The observations of a stack that ends at a row, the oldest first; None for a frame of
    zeros."""
    rows = oracle.streams[env]
    episode = spans(oracle, rows)
    first = index if episode[index] is None else episode[index][0]
    blank = None if pad == "zero" else rows[first].obs
    return [
        rows[at].obs if at >= first else blank for at in range(index - num_frames + 1, index + 1)
    ]


def horizon(oracle, env, index, max_terminals=None):
    """Rows from one to the farthest that may be drawn with it."""
    rows = oracle.streams[env]
    episode = spans(oracle, rows)
    if max_terminals is None:
        return episode[index][1] - index
    ends = sorted(
        {span[1] for span in episode[index:] if span and span[1] is not None and span[1] > index}
    )
    return (ends[min(max_terminals, len(ends)) - 1] if ends else len(rows) - 1) - index
