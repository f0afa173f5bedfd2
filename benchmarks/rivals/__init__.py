"""The same job done by others: each a process of its own that `driver.serve` drives; `job` is the job."""
