//! What Spillway's processes say to each other. No policy.

pub mod control;
pub mod jsonl;
pub mod plan;
