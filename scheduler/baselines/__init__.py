"""Published methods that best-first drafting is compared with. Nothing outside of a comparison needs them."""
