//! What a request gets where it does not say: the defaults of the v1 protocol, for the command line as well.

/// Temperature.
pub const TEMPERATURE: f32 = 0.3;
/// Nucleus.
pub const TOP_P: f32 = 0.8;
/// Tokens to generate at most.
pub const MAX_TOKENS: usize = 512;
/// Tokens that penalties look at.
pub const REPEAT_WINDOW: usize = 128;
/// Seed of a daemon request that brings none: equal requests get equal answers. The command line draws one instead.
pub const SEED: u64 = 0x1357_9BDF;

/// Peer copies for requests that do not say: what the environment's `SPILLWAY_PEER` says, if it does.
pub fn peer_copies() -> Option<String> {
    let said = std::env::var_os("SPILLWAY_PEER")?.to_string_lossy().into_owned();
    (!said.is_empty()).then_some(said)
}
