"""What logged runs say: reading verl's metrics files, statistics over paired runs, and report pages."""
