//! What can be asked, and where.

use super::access::{self, Access};
use super::answer::answer;
use super::error::{ApiError, json_response};
use super::metrics;
use super::request::Endpoint;
use crate::daemon::{Ending, Resident, Service};
use crate::engine::Readiness;
use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};

/// What every request is answered with.
#[derive(Debug, Clone)]
pub struct App {
    /// The resident model.
    pub service: Arc<Service>,
    /// Who may ask.
    pub access: Access,
    /// Turns of requests that are being read and made into prompts.
    pub prompts: Arc<Semaphore>,
    /// How far the daemon's end has come.
    pub ending: watch::Receiver<Ending>,
}

/// All routes. Whether the program is there and ready is told to everyone.
pub fn router(app: App) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .route("/metrics", get(figures))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), access::check));
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .method_not_allowed_fallback(wrong_method)
        .merge(guarded)
        .with_state(app)
}

/// The process is there, whatever it is doing.
async fn health() -> Response {
    json_response(StatusCode::OK, &json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}))
}

/// Whether a completion would be answered now.
async fn ready(State(app): State<App>) -> Response {
    let Readiness { ready, state, reason } = app.service.readiness();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(status, &json!({"ready": ready, "state": state, "reason": reason}))
}

async fn models(State(app): State<App>) -> Response {
    let models: Vec<Value> = app.service.resident().iter().map(describe).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": models}))
}

async fn model(
    State(app): State<App>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    match app.service.resident() {
        Some(resident) if name.is_ok_and(|Path(name)| resident.name() == name) => {
            Ok(json_response(StatusCode::OK, &describe(&resident)))
        }
        _ => {
            let message = "no model of this name is loaded; GET /v1/models lists what is";
            Err(ApiError::invalid(StatusCode::NOT_FOUND, "model_not_found", message))
        }
    }
}

fn describe(resident: &Resident) -> Value {
    let plan = resident.engine.plan();
    json!({
        "id": resident.name(),
        "object": "model",
        "created": resident.loaded_at,
        "owned_by": "spillway",
        "architecture": plan.model.architecture,
        "max_model_len": plan.limits.max_seq,
    })
}

async fn chat(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Endpoint::Chat, request).await
}

async fn text(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Endpoint::Text, request).await
}

async fn figures(State(app): State<App>) -> Response {
    let text = metrics::render(&app.service.diagnosis(None));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn unknown_route(uri: Uri) -> ApiError {
    let message = format!(
        "there is nothing at {}; there are /health, /ready, /metrics, /v1/models, /v1/chat/completions and /v1/completions",
        shown(&uri)
    );
    ApiError::invalid(StatusCode::NOT_FOUND, "unknown_route", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}; see the Allow header for what it does", shown(&uri));
    ApiError::invalid(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Longest path in a message, in characters.
const SHOWN_CHARS: usize = 80;

/// A path, short enough for a message.
fn shown(uri: &Uri) -> Cow<'_, str> {
    let path = uri.path();
    match path.char_indices().nth(SHOWN_CHARS) {
        None => Cow::Borrowed(path),
        Some((end, _)) => Cow::Owned(format!("{}…", &path[..end])),
    }
}
