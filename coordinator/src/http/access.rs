//! Who may ask: with a key, who knows it; without one, programs of this machine.

use super::error::ApiError;
use super::routes::App;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::net::IpAddr;
use std::str::FromStr;

/// A key that clients must send. Only its digest is kept, so that it is nowhere to be printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiKey([u8; 32]);

/// A key that no client could send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key must be printable ASCII characters without spaces, at least one")]
pub struct KeyError;

impl FromStr for ApiKey {
    type Err = KeyError;

    fn from_str(key: &str) -> Result<Self, KeyError> {
        let usable = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        if usable { Ok(ApiKey::digest(key)) } else { Err(KeyError) }
    }
}

impl ApiKey {
    /// Comparing digests takes a time that tells nothing about the key.
    fn digest(key: &str) -> ApiKey {
        ApiKey(Sha256::digest(key).into())
    }
}

/// The rule of one server.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    key: Option<ApiKey>,
}

impl Access {
    /// Only who sends `key`; without one, whoever reaches the server by an address or as `localhost`.
    pub fn new(key: Option<ApiKey>) -> Access {
        Access { key }
    }

    fn check(self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = self.key else { return check_host(headers) };
        let sent = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent = sent.and_then(|value| value.split_once(' '));
        match sent {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => {
                if ApiKey::digest(token.trim()) == key {
                    return Ok(());
                }
                let message = "the key in the Authorization header is not this server's; send the key it was started with";
                Err(ApiError::invalid(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
            }
            _ => {
                let message = "this server needs a key; send the header \"Authorization: Bearer KEY\"";
                Err(ApiError::invalid(StatusCode::UNAUTHORIZED, "missing_api_key", message))
            }
        }
    }
}

/// Web pages can make a browser send requests to this machine under a name of their own that points here. Programs use an
/// address or `localhost`.
fn check_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(host) = headers.get(HOST) else { return Ok(()) };
    let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
    let is_here = authority.as_ref().is_some_and(|authority| {
        let name = authority.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    });
    if is_here {
        return Ok(());
    }
    let message = "without a key this server is asked by address or as localhost only; start it with SPILLWAY_API_KEY to use other names";
    Err(ApiError::invalid(StatusCode::FORBIDDEN, "host_not_allowed", message))
}

/// Lets a request through, or answers for it.
pub async fn check(State(app): State<App>, request: Request, next: Next) -> Response {
    match app.access.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderName;

    fn outcome(access: Access, header: Option<(HeaderName, &str)>) -> Option<&'static str> {
        let headers = header.map(|(name, value)| (name, value.parse().unwrap())).into_iter().collect();
        access.check(&headers).err().map(|error| error.code)
    }

    #[test]
    fn a_key_is_compared_whole_and_its_scheme_without_case() {
        let access = Access::new(Some("secret".parse().unwrap()));
        let sent = |value| outcome(access, Some((AUTHORIZATION, value)));
        assert_eq!(sent("Bearer secret"), None);
        assert_eq!(sent("bearer  secret"), None);
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer SECRET", "Bearer "] {
            assert_eq!(sent(wrong), Some("invalid_api_key"), "{wrong}");
        }
        for missing in ["Basic secret", "secret", ""] {
            assert_eq!(sent(missing), Some("missing_api_key"), "{missing}");
        }
        assert_eq!(outcome(access, None), Some("missing_api_key"));
    }

    #[test]
    fn without_a_key_names_of_other_machines_are_refused() {
        let sent = |value| outcome(Access::new(None), Some((HOST, value)));
        for here in ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "192.168.0.7"] {
            assert_eq!(sent(here), None, "{here}");
        }
        for other in ["evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "", "a b"] {
            assert_eq!(sent(other), Some("host_not_allowed"), "{other}");
        }
        assert_eq!(outcome(Access::new(None), None), None);
    }

    #[test]
    fn a_key_that_cannot_be_sent_is_refused() {
        for key in ["", " ", "two words", "tab\t", "clé"] {
            assert!(key.parse::<ApiKey>().is_err(), "{key:?}");
        }
    }
}
