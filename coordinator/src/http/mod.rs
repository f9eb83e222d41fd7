//! The OpenAI-style HTTP server, beside JSON lines and over the same [`Service`](crate::daemon::Service). `docs/http.md` is the
//! reference.
//!
//! Requests are stateless. What a client can hold is bounded: connections, the size of heads and bodies, the time to send
//! them, and the time in which nothing of an answer is taken. A client that goes away takes its request with it.

mod access;
mod answer;
mod answering;
mod body;
mod chunks;
mod connection;
mod error;
mod listener;
mod messages;
mod metrics;
mod request;
mod routes;
mod socket;
mod stream;

pub use access::{ApiKey, KeyError};
pub(crate) use connection::serve;
pub use listener::{HttpAddress, HttpError, HttpServer};
