"""The worker process, its executor, and what watches over them."""
