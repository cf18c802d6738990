"""The serving benchmark behind ``runnerd bench``: requests, their arrivals, what was measured, and how it is shown."""
