//! The body of a request: JSON, bounded in size and in time.

use super::error::ApiError;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use futures_util::StreamExt;
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::time::timeout;

/// Largest body in bytes: as long as a line of the JSON-lines protocol.
pub const MAX_BODY_BYTES: usize = spillway_protocol::jsonl::MAX_LINE_BYTES;

/// How long a client may take to send its body.
const BODY_LIMIT: Duration = Duration::from_secs(60);

/// How long the rest of a body that is too large is taken.
const FORGET_LIMIT: Duration = Duration::from_secs(2);

/// Reads what a client sends, as long as it may be JSON of an allowed size.
pub async fn read(request: Request) -> Result<Vec<u8>, ApiError> {
    check_head(request.headers())?;
    timeout(BODY_LIMIT, collect(request.into_body())).await.unwrap_or_else(|_| {
        let message = format!("the body did not arrive within {} s; send it faster", BODY_LIMIT.as_secs());
        Err(ApiError::invalid(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
    })
}

/// The JSON object that was sent.
pub fn to_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(malformed("not_an_object", "the body is JSON, but not an object; send {\"model\":…}")),
        Err(error) => {
            let message = format!("the body is not valid JSON: {error}; send one JSON object");
            Err(malformed("invalid_json", message))
        }
    }
}

fn malformed(code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(StatusCode::BAD_REQUEST, code, message)
}

/// What can be refused before the body is read. A page in a browser can send other types of content to any server unasked, but
/// JSON only to one that agrees, which this one does not.
fn check_head(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let kind = text(CONTENT_TYPE).and_then(|kind| kind.split(';').next()).map(str::trim);
    if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json")) {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        let message = "the body must be JSON; send the header \"Content-Type: application/json\"";
        return Err(ApiError::invalid(status, "unsupported_media_type", message));
    }
    let length = text(CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length > MAX_BODY_BYTES as u64) { Err(too_large()) } else { Ok(()) }
}

fn too_large() -> ApiError {
    let message = format!("the body has more than {MAX_BODY_BYTES} bytes; send a smaller request");
    ApiError::invalid(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

async fn collect(body: Body) -> Result<Vec<u8>, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            malformed(
                "body_incomplete",
                format!("the body could not be read: {error}; send the request again"),
            )
        })?;
        if bytes.len() + piece.len() > MAX_BODY_BYTES {
            drop(bytes);
            // Fails when the client goes on sending.
            let _ = timeout(FORGET_LIMIT, forget(pieces)).await;
            return Err(too_large());
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// Takes what comes, as much as a body may have. A client that is still sending when the connection is closed may never see the
/// answer.
async fn forget(mut pieces: BodyDataStream) {
    let mut taken = 0;
    while let Some(Ok(piece)) = pieces.next().await {
        taken += piece.len();
        if taken > MAX_BODY_BYTES {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for_and_one_that_breaks_off_is_said() {
        let request = |body| Request::builder().header(CONTENT_TYPE, "application/json").body(body).unwrap();
        let never = Body::from_stream(stream::pending::<Result<Vec<u8>, std::io::Error>>());
        assert_eq!(read(request(never)).await.unwrap_err().code, "body_timeout");
        let broken = stream::iter([Ok(b"{".to_vec()), Err(std::io::Error::other("gone"))]);
        assert_eq!(read(request(Body::from_stream(broken))).await.unwrap_err().code, "body_incomplete");
    }
}
