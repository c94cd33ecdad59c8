"""Parts that the responses of all APIs share."""
