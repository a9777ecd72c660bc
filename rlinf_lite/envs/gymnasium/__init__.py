"""Any environment of gymnasium."""
