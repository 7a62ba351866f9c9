"""Render job scripts from a request and a site's facts, and read the request back."""
