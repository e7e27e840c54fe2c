"""The studies behind results/, which one command trains, analyses and writes down."""
