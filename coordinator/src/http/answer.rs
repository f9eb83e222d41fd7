//! One completion: from the body to the engine, and to the whole answer or a stream.
//!
//! Reading a large body and making it into a prompt takes time and many times its size in memory, and goes on when its client goes
//! away. So there are turns for it, which belong to the work and not to the client. Nobody waits for a model with a turn.

use super::answering::Answering;
use super::body::{read, to_object};
use super::chunks::Frame;
use super::error::{ApiError, json_response};
use super::request::{Asked, Endpoint, parse};
use super::routes::App;
use super::stream;
use crate::daemon::{Ending, Held, RequestCount, ask, reached, stateless};
use crate::engine::RequestError;
use crate::sampler::draw_seed;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

/// A request on its way into the engine.
pub type Starting = Pin<Box<dyn Future<Output = Result<(Answering, Frame), ApiError>> + Send>>;

/// A request as it was sent.
struct Sent {
    endpoint: Endpoint,
    body: Vec<u8>,
    /// Id of the answer.
    id: String,
    /// When it came, in seconds since 1970.
    created: u64,
}

/// What a request occupies while it is worked on. The work owns it, for it cannot be broken off.
struct Work {
    turn: OwnedSemaphorePermit,
    count: RequestCount,
}

/// Answers one request.
pub async fn answer(app: App, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    // Counted before the body is there: a request that is being sent is in flight.
    let count = app.service.count_request();
    let body = read(request).await?;
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Text => "cmpl",
    };
    let id = format!("{prefix}-{:014x}", draw_seed());
    let created = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let sent = Arc::new(Sent { endpoint, body, id, created });
    let (asked, work) = sent.read(Work::begin(&app, count).await?).await?;
    let is_stream = asked.stream;
    let starting: Starting = Box::pin(start(app, sent, asked, work));
    if is_stream {
        return stream::respond(starting).await;
    }
    let (answering, frame) = starting.await?;
    let completion = answering.whole().await?;
    Ok(json_response(StatusCode::OK, &frame.whole(&completion)))
}

/// Gives a request to the engine, once there is a model, unless the daemon stops before.
async fn start(app: App, sent: Arc<Sent>, asked: Asked, work: Work) -> Result<(Answering, Frame), ApiError> {
    let mut ending = app.ending.clone();
    let names = asked.names.clone();
    let started = tokio::select! {
        // Looked at first: a load that is given up at the end leaves no model.
        biased;
        () = reached(&mut ending, Ending::Stopping) => Err(ApiError::shutting_down()),
        started = async {
            let (held, asked, work) = match app.service.try_hold() {
                Some(held) => (held, asked, work),
                None => sent.wait(&app, asked, work).await?,
            };
            submit(app, &sent, held, asked, work).await
        } => started,
    };
    started.map_err(|error| error.under(&names))
}

/// Makes the prompt and gives it to the engine.
async fn submit(
    app: App,
    sent: &Sent,
    held: Held,
    Asked { generate, include_usage, .. }: Asked,
    Work { turn, count }: Work,
) -> Result<(Answering, Frame), ApiError> {
    let generate = Arc::new(generate);
    let asked = ask(
        held,
        &generate,
        |defaults| &defaults.openai,
        move |resident, generate| {
            let prompt = stateless(&resident.engine, generate);
            drop(turn);
            Ok((prompt?, (resident.name(), count)))
        },
    );
    let (asked, (model, count)) = asked.await.map_err(|error| ApiError::from(&error))?;
    let &Sent { endpoint, created, .. } = sent;
    let frame = Frame { endpoint, id: sent.id.clone(), created, model, include_usage };
    Ok((Answering::start(asked, count, app.ending).await?, frame))
}

impl Work {
    /// Waits for a turn.
    async fn begin(app: &App, count: RequestCount) -> Result<Work, ApiError> {
        // Fails only when it is closed, which it never is.
        let turn = app.prompts.clone().acquire_owned().await.map_err(|_| broken())?;
        Ok(Work { turn, count })
    }
}

impl Sent {
    /// What the body asks for.
    async fn read(self: &Arc<Self>, work: Work) -> Result<(Asked, Work), ApiError> {
        let sent = self.clone();
        let reading = spawn_blocking(move || {
            let asked = to_object(&sent.body)
                .and_then(|body| parse(sent.endpoint, body, sent.id.clone(), draw_seed()));
            (asked, work)
        });
        let (asked, work) = reading.await.map_err(|_| broken())?;
        Ok((asked?, work))
    }

    /// Waits while the model is being replaced: without a turn, and as the bytes that were sent, which are the smallest form. They
    /// are read again afterwards.
    async fn wait(
        self: &Arc<Self>,
        app: &App,
        asked: Asked,
        Work { turn, count }: Work,
    ) -> Result<(Held, Asked, Work), ApiError> {
        drop((asked, turn));
        let held = app.service.hold().await;
        let (asked, work) = self.read(Work::begin(app, count).await?).await?;
        Ok((held, asked, work))
    }
}

fn broken() -> ApiError {
    let message = "reading the request ended unexpectedly; see the log on standard error";
    ApiError::from(&RequestError::internal(message))
}
