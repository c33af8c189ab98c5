"""The views of the page, one module each: addresses, and what their templates show."""
