//! Refusals and failures in OpenAI's shape: `{"error":{"message","type","param","code"}}`.

use crate::engine::{ErrorClass, RequestError};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use spillway_protocol::jsonl::LineError;

/// Clients of OpenAI's own libraries repeat a request after a failure unless this header says no.
const SHOULD_RETRY: &str = "x-should-retry";

/// Fields that refusals by the engine are about, by code.
const FIELDS: &[(&str, &str)] = &[
    ("tools_unsupported", "tools"),
    ("invalid_stop", "stop"),
    ("empty_prompt", "prompt"),
    ("token_out_of_range", "prompt"),
    ("context_length_exceeded", "prompt"),
    ("chat_template_refused", "prompt"),
    ("messages_too_deep", "prompt"),
    ("template_argument_reserved", "chat_template_kwargs"),
];

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    /// Stable.
    pub code: &'static str,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    /// Whether the same request may succeed later.
    retryable: bool,
}

impl ApiError {
    /// A request that cannot be answered as it is.
    pub fn invalid(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, code, message: message.into(), param: None, retryable: false }
    }

    /// A field that cannot be used.
    pub fn field(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let param = Some(param.into());
        ApiError { param, ..ApiError::invalid(StatusCode::BAD_REQUEST, code, message) }
    }

    /// The same with the field under the name that the client has sent; `names` are the program's own and the client's.
    pub fn under(mut self, names: &[(&str, &'static str)]) -> ApiError {
        if let Some(param) = &mut self.param
            && let Some((own, sent)) = names.iter().find(|(own, _)| own == param)
        {
            if let Some(rest) = self.message.strip_prefix(own) {
                self.message = format!("{sent}{rest}");
            }
            *param = (*sent).to_owned();
        }
        self
    }

    /// The server ends before the answer does.
    pub fn shutting_down() -> ApiError {
        let message =
            "the server is ending and has aborted the request; send it again when the server is back";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        ApiError { retryable: true, ..ApiError::invalid(status, "shutting_down", message) }
    }

    /// The kind as OpenAI's clients know it.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body, which is also how a stream that has begun ends.
    pub fn body(&self) -> Value {
        let ApiError { code, message, param, .. } = self;
        json!({"error": {"message": message, "type": self.kind(), "param": param, "code": code}})
    }
}

impl From<LineError> for ApiError {
    fn from(error: LineError) -> Self {
        let status = StatusCode::BAD_REQUEST;
        let param = error.field().map(str::to_owned);
        ApiError { param, ..ApiError::invalid(status, error.code(), error.to_string()) }
    }
}

impl From<&RequestError> for ApiError {
    fn from(error: &RequestError) -> Self {
        let status = match (error.code, error.class) {
            ("no_model_loaded", _) => StatusCode::SERVICE_UNAVAILABLE,
            ("queue_full", _) => StatusCode::TOO_MANY_REQUESTS,
            (_, ErrorClass::Validation | ErrorClass::ContextLength | ErrorClass::Unsupported) => {
                StatusCode::BAD_REQUEST
            }
            (_, ErrorClass::Transient) => StatusCode::SERVICE_UNAVAILABLE,
            (_, ErrorClass::Internal) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let retryable = error.retryable || error.code == "no_model_loaded";
        let by_code = || FIELDS.iter().find(|(code, _)| *code == error.code).map(|(_, field)| *field);
        let param = error.field.or_else(by_code).map(str::to_owned);
        ApiError { retryable, param, ..ApiError::invalid(status, error.code, error.message.clone()) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        let headers = response.headers_mut();
        let should_retry = HeaderValue::from_static(if self.retryable { "true" } else { "false" });
        headers.insert(SHOULD_RETRY, should_retry);
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A response with a JSON body.
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
