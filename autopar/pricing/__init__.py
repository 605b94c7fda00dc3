"""Seconds and bytes of a fully pinned configuration of a reference model, from hardware figures alone."""

from autopar.pricing.configuration import PricedRow, price_row

__all__ = ["PricedRow", "price_row"]
