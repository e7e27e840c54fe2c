"""The studies behind results/: trained, analysed and written down by one command."""
