//! Where the server listens, decided and checked before anything else starts.

use super::access::{Access, ApiKey};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::str::FromStr;

/// An address to listen on: `127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or a port of the loopback interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpAddress(pub SocketAddr);

impl FromStr for HttpAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port = text.strip_prefix("localhost:").unwrap_or(text).parse();
        let loopback = port.map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        loopback
            .or_else(|_| text.parse())
            .map(HttpAddress)
            .map_err(|_| "expected an address and a port, for example 127.0.0.1:8080, or a port")
    }
}

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Everyone on the network could use the model.
    #[error(
        "{0} can be reached from other machines, so it needs a key; set SPILLWAY_API_KEY, or listen on 127.0.0.1"
    )]
    NeedsKey(SocketAddr),
    /// Another program listens there.
    #[error("{0} is taken by another program; end it or listen on another port (port 0 takes a free one)")]
    InUse(SocketAddr),
    /// The system refused.
    #[error("cannot listen on {address}: {source}; choose another address or port")]
    Io {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

impl HttpError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            HttpError::NeedsKey(_) => "api_key_required",
            HttpError::InUse(_) => "http_in_use",
            HttpError::Io { .. } => "http_failed",
        }
    }
}

/// A server that listens and does not answer yet.
#[derive(Debug)]
pub struct HttpServer {
    pub(super) listener: TcpListener,
    pub(super) access: Access,
    address: SocketAddr,
}

impl HttpServer {
    /// Listens; beyond the loopback interface only with a key.
    ///
    /// # Errors
    /// [`HttpError`]; nothing has been started then.
    pub fn bind(HttpAddress(address): HttpAddress, key: Option<ApiKey>) -> Result<HttpServer, HttpError> {
        if !address.ip().is_loopback() && key.is_none() {
            return Err(HttpError::NeedsKey(address));
        }
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::AddrInUse => HttpError::InUse(address),
            _ => HttpError::Io { address, source },
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(HttpServer { listener, access: Access::new(key), address })
    }

    /// Where it listens; the port is the real one.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Option<SocketAddr> {
        text.parse().ok().map(|HttpAddress(address)| address)
    }

    #[test]
    fn addresses_in_every_spelling() {
        let loopback = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 80)));
        for text in ["80", "localhost:80", "127.0.0.1:80"] {
            assert_eq!(address(text), loopback, "{text}");
        }
        assert!(address("[::1]:80").is_some());
        for text in ["", "x", "127.0.0.1", "70000", "localhost", ":80", "localhost:localhost:80"] {
            assert_eq!(address(text), None, "{text}");
        }
    }

    #[test]
    fn other_machines_need_a_key_and_a_taken_port_is_said() {
        let any: HttpAddress = "0.0.0.0:0".parse().unwrap();
        assert_eq!(HttpServer::bind(any, None).unwrap_err().code(), "api_key_required");
        let server = HttpServer::bind(any, Some("secret".parse().unwrap())).unwrap();
        let taken = HttpAddress(SocketAddr::from((Ipv4Addr::LOCALHOST, server.address().port())));
        assert_eq!(HttpServer::bind(taken, None).unwrap_err().code(), "http_in_use");
        let nowhere: HttpAddress = "192.0.2.1:80".parse().unwrap();
        let key = Some("secret".parse().unwrap());
        assert_eq!(HttpServer::bind(nowhere, key).unwrap_err().code(), "http_failed");
    }
}
