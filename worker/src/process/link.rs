//! Links to the neighbours, arranged as the coordinator asks: before steps are served, and again when a neighbour is replaced.

use super::ProcessError;
use crate::band::Band;
use spillway_protocol::channel::Sender;
use spillway_protocol::control::{FromWorker, ToWorker};
use std::sync::mpsc::{Receiver, TryRecvError};

/// Both directions of the conversation about links.
#[derive(Debug)]
pub(super) struct Links<'a> {
    requests: &'a Receiver<ToWorker>,
    sender: &'a mut Sender<FromWorker>,
}

impl<'a> Links<'a> {
    pub(super) fn new(requests: &'a Receiver<ToWorker>, sender: &'a mut Sender<FromWorker>) -> Self {
        Self { requests, sender }
    }

    /// Arranges links until the coordinator says that steps may come.
    pub(super) fn arrange(&mut self, band: &mut impl Band) -> Result<(), ProcessError> {
        loop {
            match self.requests.recv() {
                Ok(ToWorker::Serve) => return Ok(()),
                Ok(request) => self.take(request, band)?,
                // The control thread ends when the process should.
                Err(_) => return Err(ProcessError::Stopped),
            }
        }
    }

    /// Answers what has been asked between steps.
    pub(super) fn answer(&mut self, band: &mut impl Band) -> Result<(), ProcessError> {
        loop {
            match self.requests.try_recv() {
                Ok(request) => self.take(request, band)?,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    fn take(&mut self, request: ToWorker, band: &mut impl Band) -> Result<(), ProcessError> {
        match request {
            ToWorker::Offer => self.sender.send(&FromWorker::Offered(band.offer()))?,
            ToWorker::Connect(share) => self.sender.send(&FromWorker::Connected(band.connect(&share)))?,
            // The control thread passes on nothing else.
            ToWorker::Serve | ToWorker::Load(_) | ToWorker::Shutdown => {}
        }
        Ok(())
    }
}
