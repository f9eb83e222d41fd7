//! The order of one connection's messages. Requests run side by side; a load or unload waits for the requests before it
//! and holds back those after it, as if lines were handled one by one.

use tokio::sync::{mpsc, watch};

/// Gives out tickets in the order of the lines.
#[derive(Debug)]
pub struct Order {
    /// Open once the barrier before the next message is over.
    gate: Gate,
    group: mpsc::Sender<()>,
    members: mpsc::Receiver<()>,
}

/// Something that opens once and stays open.
#[derive(Debug, Clone)]
struct Gate(watch::Receiver<()>);

impl Gate {
    /// A gate, and what opens it when dropped.
    fn new() -> (watch::Sender<()>, Gate) {
        let (sender, receiver) = watch::channel(());
        (sender, Gate(receiver))
    }

    async fn opened(&mut self) {
        // Nothing is ever sent: the wait ends when the sender is dropped.
        while self.0.changed().await.is_ok() {}
    }
}

/// The place of a request.
#[derive(Debug)]
pub struct Ticket {
    gate: Gate,
    place: Place,
}

/// The next barrier waits until this and all its clones are dropped.
#[derive(Debug, Clone)]
pub struct Place {
    _member: mpsc::Sender<()>,
}

impl Ticket {
    /// Keeps the place beyond the life of the ticket.
    pub fn place(&self) -> Place {
        self.place.clone()
    }

    /// Waits for the barrier before this request.
    pub async fn admitted(&mut self) {
        self.gate.opened().await;
    }
}

/// The place of a load or unload. Later messages wait until it is dropped.
#[derive(Debug)]
pub struct Barrier {
    gate: Gate,
    members: mpsc::Receiver<()>,
    _opens: watch::Sender<()>,
}

impl Barrier {
    /// Waits for the barrier before this one.
    pub async fn admitted(&mut self) {
        self.gate.opened().await;
    }

    /// Waits for the requests before this one.
    pub async fn earlier_ended(&mut self) {
        while self.members.recv().await.is_some() {}
    }
}

impl Default for Order {
    fn default() -> Self {
        let (group, members) = mpsc::channel(1);
        let (_, gate) = Gate::new();
        Order { gate, group, members }
    }
}

impl Order {
    /// A place for a request.
    pub fn request(&self) -> Ticket {
        Ticket { gate: self.gate.clone(), place: Place { _member: self.group.clone() } }
    }

    /// A place for a load or unload.
    pub fn barrier(&mut self) -> Barrier {
        let (opens, gate) = Gate::new();
        let (group, members) = mpsc::channel(1);
        self.group = group;
        Barrier {
            gate: std::mem::replace(&mut self.gate, gate),
            members: std::mem::replace(&mut self.members, members),
            _opens: opens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn ready(future: impl Future<Output = ()>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[test]
    fn a_barrier_waits_for_what_came_before_and_holds_back_what_comes_after() {
        let mut order = Order::default();
        let (mut first, mut second) = (order.request(), order.request());
        assert!(ready(first.admitted()) && ready(second.admitted()));
        let mut barrier = order.barrier();
        let mut after = order.request();
        assert!(ready(barrier.admitted()));
        assert!(!ready(after.admitted()));
        drop(first);
        assert!(!ready(barrier.earlier_ended()));
        let place = second.place();
        drop(second);
        assert!(!ready(barrier.earlier_ended()));
        drop(place);
        assert!(ready(barrier.earlier_ended()));
        assert!(!ready(after.admitted()));
        drop(barrier);
        assert!(ready(after.admitted()));
    }

    #[test]
    fn barriers_queue_behind_one_another() {
        let mut order = Order::default();
        let (first, mut second) = (order.barrier(), order.barrier());
        assert!(!ready(second.admitted()));
        drop(first);
        assert!(ready(second.admitted()) && ready(second.earlier_ended()));
    }
}
