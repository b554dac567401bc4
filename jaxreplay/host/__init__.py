"""Arrays of the host: what callers give, in the dtypes that are stored, and steps that wait."""
