"""The commands: what looks at machines, jobs and traces, and what measures. Nothing else of hybridps uses it."""
