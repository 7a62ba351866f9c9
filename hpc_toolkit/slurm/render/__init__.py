"""From a request and a site's facts to a job script, and back."""
