"""Which method under which cap: fitted levels, scores over tasks, maps."""
