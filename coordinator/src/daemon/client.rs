//! One connection: reads lines, starts what they ask for, and ends when everything accepted has ended.

use super::answer::answer;
use super::conversation::Conversation;
use super::line::LineReader;
use super::order::{Barrier, Order};
use super::outbox::{Outbox, outbox};
use super::service::{Resident, Service, stages};
use super::start::{LoadError, Wanted};
use crate::workers::{Link, LoadProgress};
use spillway_model::tokenizer::TokenizerOptions;
use spillway_protocol::jsonl::{
    Class, ErrorEvent, Event, Generate, LineError, Load, Loaded, Rejected, Request, parse_line,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// How far the daemon's end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// Messages are accepted.
    Serving,
    /// No more messages; what was accepted runs to its end.
    Draining,
    /// What still runs is aborted.
    Stopping,
}

/// Why a request was aborted, as the client reads it.
pub type AbortReason = &'static str;

/// What the tasks of one connection share.
#[derive(Debug)]
pub struct Client {
    /// The resident model.
    pub service: Arc<Service>,
    /// Events to the client.
    pub outbox: Outbox,
    conversation: Mutex<Conversation>,
    /// Requests accepted and not ended; the sender is taken by the first abort.
    live: Mutex<HashMap<String, Option<oneshot::Sender<AbortReason>>>>,
}

/// What a connection has under way.
#[derive(Debug, Default)]
struct Tasks {
    requests: JoinSet<()>,
    /// Loads, reloads and unloads. They are given up when the daemon stops: ending the process ends what they have started.
    loads: JoinSet<()>,
}

impl Tasks {
    /// Waits for the end of any task; none when there are no more.
    async fn ended(&mut self) -> Option<()> {
        let ended = tokio::select! {
            Some(ended) = self.requests.join_next() => ended,
            Some(ended) = self.loads.join_next() => ended,
            else => return None,
        };
        if let Err(error) = ended
            && error.is_panic()
        {
            tracing::error!(%error, "the handling of a message has panicked");
        }
        Some(())
    }
}

/// Serves one connection until its lines end (or the daemon ends), everything accepted has ended, and the client has
/// heard of it. `gone` completes when the client can hear no more.
pub async fn serve(
    service: Arc<Service>,
    from: impl AsyncRead + Unpin,
    to: impl AsyncWrite + Unpin + Send + 'static,
    gone: impl Future<Output = ()>,
    mut ending: watch::Receiver<Ending>,
) {
    let (outbox, writer) = outbox();
    let watched = outbox.clone();
    let writer = tokio::spawn(writer.run(to));
    let client = Arc::new(Client { service, outbox, conversation: Mutex::default(), live: Mutex::default() });
    let mut tasks = Tasks::default();
    let session = async {
        client.read(LineReader::new(from), &mut tasks, &mut ending).await;
        client.drain(&mut tasks, &mut ending).await;
    };
    tokio::select! {
        () = session => {}
        () = either(gone, watched.lost()) => client.outbox.lose(),
    }
    // Either everything has ended, or the client is lost and whatever still runs for it is in vain.
    client.abort_all("client_gone");
    while tasks.ended().await.is_some() {}
    client.outbox.finish();
    if let Err(error) = writer.await {
        tracing::error!(%error, "the writer of a client has panicked");
    }
}

/// Completes when the daemon's end has come that far.
pub async fn reached(watched: &mut watch::Receiver<Ending>, value: Ending) {
    // Fails only when the sender is gone, which is an end, too.
    let _ = watched.wait_for(|now| *now >= value).await;
}

async fn either(first: impl Future<Output = ()>, second: impl Future<Output = ()>) {
    tokio::select! {
        () = first => {}
        () = second => {}
    }
}

impl Client {
    /// Accepts lines until they end or the daemon does.
    async fn read(
        self: &Arc<Self>,
        mut lines: LineReader<impl AsyncRead + Unpin>,
        tasks: &mut Tasks,
        ending: &mut watch::Receiver<Ending>,
    ) {
        let mut order = Order::default();
        loop {
            tokio::select! {
                line = lines.next() => match line {
                    Ok(Some(line)) => self.accept(line, &mut order, tasks),
                    Ok(None) => return,
                    Err(error) => {
                        tracing::warn!(%error, "a client cannot be read any more");
                        return;
                    }
                },
                // Ended tasks are collected, so that a long session does not pile them up.
                Some(()) = tasks.ended() => {}
                () = reached(ending, Ending::Draining) => return,
            }
        }
    }

    /// Waits for everything accepted.
    async fn drain(&self, tasks: &mut Tasks, ending: &mut watch::Receiver<Ending>) {
        let mut stopping = false;
        loop {
            tokio::select! {
                task = tasks.ended() => if task.is_none() { return },
                () = reached(ending, Ending::Stopping), if !stopping => {
                    stopping = true;
                    self.abort_all("shutdown");
                }
            }
            // After the requests that wait for a load: they would find that there is no model.
            if stopping && tasks.requests.is_empty() {
                tasks.loads.abort_all();
            }
        }
    }

    /// Starts what a line asks for.
    fn accept(self: &Arc<Self>, line: Result<String, LineError>, order: &mut Order, tasks: &mut Tasks) {
        let request = line.map_err(Rejected::from).and_then(|line| parse_line(&line));
        match request {
            Err(rejected) => self.outbox.push(&Event::Error(rejected.into())),
            Ok(Request::Generate(request)) => self.start_generate(*request, order, tasks),
            Ok(Request::Abort { id }) => self.abort(&id),
            Ok(Request::Load(load)) => {
                tasks.loads.spawn(self.clone().load(*load, order.barrier()));
            }
            Ok(Request::Reload { id, progress }) => {
                tasks.loads.spawn(self.clone().reload(id, progress, order.barrier()));
            }
            Ok(Request::Unload { id }) => {
                tasks.loads.spawn(self.clone().unload(id, order.barrier()));
            }
            Ok(Request::Reset { id }) => {
                self.conversation().reset();
                self.outbox.push(&Event::Reset { id, seq_pos: 0 });
            }
            Ok(Request::Ping { id }) => self.outbox.push(&Event::Pong { id }),
            Ok(Request::Diag { id }) => self.outbox.push(&Event::Diag(Box::new(self.service.diagnosis(id)))),
        }
    }

    fn start_generate(self: &Arc<Self>, request: Generate, order: &Order, tasks: &mut Tasks) {
        let id = request.id.clone();
        let (abort, aborted) = oneshot::channel();
        let mut live = self.live();
        if live.contains_key(&id) {
            drop(live);
            let message =
                format!("a request with the id \"{id}\" is in flight; wait for its end or choose another id");
            self.outbox.push(&Event::Error(ErrorEvent::new(
                Some(id),
                "duplicate_id",
                Class::Validation,
                message,
            )));
            return;
        }
        live.insert(id.clone(), Some(abort));
        drop(live);
        let client = self.clone();
        let ticket = order.request();
        let place = ticket.place();
        let count = self.service.count_request();
        // A task of its own, so that even a panic cannot leave the request without an end.
        let answer = tokio::spawn(answer(self.clone(), request, aborted, ticket));
        tasks.requests.spawn(async move {
            let event = answer.await.unwrap_or_else(|error| {
                tracing::error!(%error, %id, "a request has panicked");
                let message =
                    "answering the request ended unexpectedly; see the log on standard error".to_owned();
                Event::Error(ErrorEvent::new(Some(id.clone()), "internal", Class::Internal, message))
            });
            // The id is free and the request not counted before the client can know that it has ended.
            client.live().remove(&id);
            drop(count);
            client.outbox.push(&event);
            // Only now may a load or unload that waits for this request go on.
            drop(place);
        });
    }

    fn abort(&self, id: &str) {
        match self.live().get_mut(id).map(Option::take) {
            Some(Some(abort)) => abort_with(abort, "client"),
            // It is being aborted already.
            Some(None) => {}
            None => {
                let message = format!(
                    "no request with the id \"{id}\" is in flight on this connection; nothing to abort"
                );
                let error = ErrorEvent::new(Some(id.to_owned()), "unknown_request", Class::Cancel, message);
                self.outbox.push(&Event::Error(error));
            }
        }
    }

    fn abort_all(&self, reason: AbortReason) {
        for abort in self.live().values_mut().filter_map(Option::take) {
            abort_with(abort, reason);
        }
    }

    async fn load(self: Arc<Self>, load: Load, mut barrier: Barrier) {
        let started = Instant::now();
        let Load { id, model, progress, assume_pre, plan, params } = load;
        let wanted = Wanted { model, tokenizer: TokenizerOptions { assume_pre }, plan, params };
        barrier.admitted().await;
        let report = self.load_reporter(id.clone(), progress);
        let result = self.service.load(wanted, barrier.earlier_ended(), report).await;
        self.outbox.push(&loaded_event(id, result, started));
    }

    async fn reload(self: Arc<Self>, id: Option<String>, progress: bool, mut barrier: Barrier) {
        let started = Instant::now();
        barrier.admitted().await;
        let report = self.load_reporter(id.clone(), progress);
        let result = self.service.reload(barrier.earlier_ended(), report).await;
        self.outbox.push(&loaded_event(id, result, started));
    }

    /// Tells the client of a load's progress, if it wants to know.
    fn load_reporter(&self, id: Option<String>, progress: bool) -> impl FnMut(LoadProgress) + use<> {
        let outbox = self.outbox.clone();
        move |now| {
            if progress {
                outbox.push(&load_event(id.clone(), now));
            }
        }
    }

    async fn unload(self: Arc<Self>, id: Option<String>, mut barrier: Barrier) {
        barrier.admitted().await;
        self.service.unload(barrier.earlier_ended()).await;
        self.outbox.push(&Event::Unloaded { id });
    }

    /// The conversation of this connection.
    pub fn conversation(&self) -> MutexGuard<'_, Conversation> {
        self.conversation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> MutexGuard<'_, HashMap<String, Option<oneshot::Sender<AbortReason>>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn abort_with(abort: oneshot::Sender<AbortReason>, reason: AbortReason) {
    // Fails only when the request has just ended: its own last event is on its way.
    let _ = abort.send(reason);
}

/// What a client is told at the end of a load.
fn loaded_event(id: Option<String>, result: Result<Resident, LoadError>, started: Instant) -> Event {
    match result {
        Err(error) => Event::Error(error.event(id)),
        Ok(resident) => {
            let plan = resident.engine.plan();
            Event::Loaded(Loaded {
                id,
                arch: plan.model.architecture.clone(),
                dim: plan.model.d_model,
                layers: plan.model.layers,
                vocab: plan.model.vocab,
                vl: false,
                max_seq: plan.limits.max_seq,
                parallel: plan.limits.max_sequences,
                stages: stages(&resident.engine),
                load_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            })
        }
    }
}

/// What a client is told during a load.
fn load_event(id: Option<String>, now: LoadProgress) -> Event {
    match now {
        LoadProgress::Weights { stage, done, total, .. } => Event::Loading { id, stage, done, total },
        LoadProgress::Link(Link { from, path, reason }) => {
            Event::Link { id, from, to: from + 1, path: path.name(), reason }
        }
    }
}
