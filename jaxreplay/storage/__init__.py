"""How rows lie: streams, their layout and arrays, episodes, and the rows that can be sampled."""
