//! `daemon`: serve JSON lines, and HTTP if asked.

use super::args::{DaemonArgs, ServerArgs};
use super::failure::Failure;
use super::output;
use crate::config::ConfigFile;
use crate::daemon::{DaemonEnd, DaemonOptions, FirstLoad, run};
use crate::http::{HttpAddress, HttpServer};

/// Serves until the end of standard input or a signal.
pub fn daemon(args: &DaemonArgs, config: ConfigFile) -> Result<(), Failure> {
    let stdio = true;
    serve_until_end(stdio, args.http, &args.server, None, config)
}

/// Listens where it is asked to and serves until the end; the user hears where HTTP is, for the port may be one that the system
/// chose.
pub fn serve_until_end(
    stdio: bool,
    http: Option<HttpAddress>,
    args: &ServerArgs,
    load: Option<FirstLoad>,
    config: ConfigFile,
) -> Result<(), Failure> {
    let key = args.api_key()?;
    let http = http.map(|address| HttpServer::bind(address, key)).transpose()?;
    if let Some(server) = &http {
        output::note(&format!("listening on http://{}", server.address()));
    }
    let ServerArgs { listen, drain_limit, .. } = args;
    let options =
        DaemonOptions { stdio, listen: listen.clone(), http, load, drain_limit: *drain_limit, config };
    match run(options)? {
        DaemonEnd::Drained => Ok(()),
        DaemonEnd::Interrupted => Err(Failure::Interrupted),
    }
}
