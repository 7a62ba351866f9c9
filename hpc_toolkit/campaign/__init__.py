"""Campaigns: settings, decisions, the coordinator that makes them, and the summary."""
