//! worker-cpu
