"""Clusters of real processes whose model waits as long as coefficients say."""
