"""A real pair on the field's prompts: tokens per pass of offspec and of published methods."""
