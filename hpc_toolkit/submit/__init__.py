"""Jobs of a run: submitted, noted, followed, cancelled."""
