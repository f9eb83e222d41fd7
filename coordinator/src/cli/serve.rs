//! `serve`: load a model, then answer HTTP.

use super::args::ServeArgs;
use super::daemon::serve_until_end;
use super::failure::Failure;
use super::output;
use super::progress::ProgressView;
use crate::config::ConfigFile;
use crate::daemon::{FirstLoad, Wanted};

/// Serves until a signal comes.
pub fn serve(args: &ServeArgs, config: ConfigFile) -> Result<(), Failure> {
    let wanted = Wanted {
        model: args.model.model.clone(),
        tokenizer: args.model.tokenizer.options(),
        plan: args.saved.plan.clone(),
        params: args.placement.params(),
    };
    let mut view = ProgressView::new(args.progress.mode());
    let load = FirstLoad {
        wanted,
        progress: Box::new(move |progress| view.show(&progress)),
        loaded: Box::new(|name| output::note(&format!("ready: {name}"))),
    };
    let stdio = false;
    serve_until_end(stdio, Some(args.http), &args.server, Some(load), config)
}
