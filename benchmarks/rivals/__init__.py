"""Other systems running the same job, each in its own process driven through `driver.serve`."""
