"""Dropless expert layers: one interface, and backends that differ only in speed."""
