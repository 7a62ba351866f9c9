"""The worker process, its executor, and checks on silent workers and failing hosts."""
