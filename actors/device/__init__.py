"""Firings on streams of devices; the host as a device."""
