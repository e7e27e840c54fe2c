"""Dropless expert layers: one interface, backends that differ in speed only."""
