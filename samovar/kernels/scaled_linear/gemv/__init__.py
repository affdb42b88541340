"""The scaled product of one token, which is rounded on the fly."""
