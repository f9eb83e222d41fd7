//! What the coordinator asks of a loaded worker beside steps: links to its neighbours, and where incarnations begin.

use super::ProcessError;
use crate::band::Band;
use spillway_protocol::channel::Sender;
use spillway_protocol::control::{FromWorker, ToWorker};
use std::ops::ControlFlow;
use std::sync::mpsc::Receiver;

/// Requests as the control thread passes them on, and the way back.
#[derive(Debug)]
pub(super) struct Requests<'a> {
    asked: Receiver<ToWorker>,
    sender: &'a mut Sender<FromWorker>,
    epoch: u64,
}

impl<'a> Requests<'a> {
    /// Requests to a worker that was loaded for `epoch`.
    pub(super) fn new(asked: Receiver<ToWorker>, sender: &'a mut Sender<FromWorker>, epoch: u64) -> Self {
        Self { asked, sender, epoch }
    }

    /// The latest incarnation that was told.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Answers requests until the coordinator says that steps may come.
    pub(super) fn until_serving(&mut self, band: &mut impl Band) -> Result<(), ProcessError> {
        loop {
            // The control thread ends when the process should.
            let request = self.asked.recv().map_err(|_| ProcessError::Stopped)?;
            if self.answer(&request, band)?.is_break() {
                return Ok(());
            }
        }
    }

    /// Answers what has been asked meanwhile. Links are arranged anew when a neighbour has been replaced; no step is under way then.
    pub(super) fn answer_pending(&mut self, band: &mut impl Band) -> Result<(), ProcessError> {
        while let Ok(request) = self.asked.try_recv() {
            let _serving = self.answer(&request, band)?;
        }
        Ok(())
    }

    /// `Break` when all links are arranged.
    fn answer(&mut self, request: &ToWorker, band: &mut impl Band) -> Result<ControlFlow<()>, ProcessError> {
        match request {
            ToWorker::Offer => self.sender.send(&FromWorker::Offered(band.offer()))?,
            ToWorker::Connect(share) => {
                self.sender.send(&FromWorker::Connected(band.connect(share.as_ref())))?
            }
            ToWorker::Begin(epoch) => {
                self.epoch = *epoch;
                self.sender.send(&FromWorker::Begun)?;
            }
            ToWorker::Serve => return Ok(ControlFlow::Break(())),
            // Not passed on by the control thread.
            ToWorker::Load(_) | ToWorker::Shutdown => return Err(ProcessError::Stopped),
        }
        Ok(ControlFlow::Continue(()))
    }
}
