"""Reports and live pages."""
