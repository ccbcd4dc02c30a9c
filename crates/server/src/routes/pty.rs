//! `/v1/sessions/{session}/pty`: a terminal in the session's sandbox, over a WebSocket. Also parses
//! the query of every terminal route.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{ExecRequest, Problem, SocketOut},
    bridge::Terminal,
};
use harvest_session::sandboxes::TerminalRequest;

use crate::{
    ServerState,
    auth::RevokedOrShutdown,
    authorization::Access::Change,
    extract::{Path, Query},
    problem::ApiError,
    routes::route::{Routes, routes},
    validate,
    websocket::{self, SocketKind, Upgrade},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        // Access to the sandbox may resume the session, and reveals more than the session's events.
        pty_open: Change,
    ]
}

/// Opens a terminal that runs a shell or another command. Binary frames carry bytes both ways; text
/// frames are JSON: `{"resize":{"rows":24,"cols":80}}` to the server, `{"exited":{…}}` from it. A
/// paused session is resumed. Closing the socket hangs up the terminal.
#[utoipa::path(get, path = "/v1/sessions/{session}/pty", tag = "sessions",
    params(
        ("rows" = Option<u16>, Query, description = "Height of the terminal; 24 by default", minimum = 1, maximum = 4096),
        ("cols" = Option<u16>, Query, description = "Width of the terminal; 80 by default", minimum = 1, maximum = 4096),
        ("term" = Option<String>, Query, description = "The `TERM` variable; `xterm-256color` by default"),
        ("argv" = Option<Vec<String>>, Query, description = "Program and arguments, one parameter each; a shell by default"),
        ("cwd" = Option<String>, Query, description = "Working directory; the primary checkout by default"),
        ("user" = Option<String>, Query, description = "`harvest` (default) or `root`"),
    ),
    responses((status = 101, body = SocketOut, description = "The terminal; the last text frame reports how it ended"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no sandbox, and none could be started")))]
async fn pty_open(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Vec<(String, String)>>,
    RevokedOrShutdown(cancel): RevokedOrShutdown,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let request = terminal_request(query)?;
    // Started before the upgrade, so that errors are ordinary problem responses.
    let (running, input) = state.sessions.sandbox_handle(&session).await?.terminal(request).await?;
    Ok(upgrade.on_upgrade(|socket| {
        websocket::relay(socket, running, Some(input), SocketKind::Terminal, cancel)
    }))
}

pub(crate) fn terminal_request(query: Vec<(String, String)>) -> Result<TerminalRequest, ApiError> {
    let terminal = Terminal { rows: 24, cols: 80, term: None };
    let mut request = TerminalRequest { terminal, ..TerminalRequest::default() };
    for (name, value) in query {
        match name.as_str() {
            "rows" => request.terminal.rows = dimension(&value)?,
            "cols" => request.terminal.cols = dimension(&value)?,
            "term" => request.terminal.term = Some(term(value)?),
            "argv" => request.argv.push(value),
            "cwd" => request.cwd = Some(value),
            "user" => request.user = Some(value),
            _ => {
                let detail = format!("unknown parameter `{name}`");
                return Err(ApiError::invalid("invalid_query", detail));
            }
        }
    }
    let TerminalRequest { argv, cwd, user, .. } = request.clone();
    let argv = if argv.is_empty() { vec!["sh".to_owned()] } else { argv };
    validate::exec(&ExecRequest { argv, cwd, user, ..ExecRequest::default() })?;
    Ok(request)
}

fn dimension(value: &str) -> Result<u16, ApiError> {
    value
        .parse()
        .ok()
        .filter(|dimension| (1..=4096).contains(dimension))
        .ok_or_else(|| ApiError::invalid("invalid_query", "`rows` and `cols` must be 1 to 4096"))
}

fn term(value: String) -> Result<String, ApiError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    if (1..=64).contains(&value.len()) && value.bytes().all(allowed) {
        return Ok(value);
    }
    Err(ApiError::invalid("invalid_query", "`term` must be a terminal name such as `xterm`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &[(&str, &str)]) -> Result<TerminalRequest, &'static str> {
        let query =
            query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        terminal_request(query).map_err(|error| error.code)
    }

    #[test]
    fn invalid_terminal_parameters_are_rejected() {
        let plain = parse(&[]).unwrap();
        assert_eq!((plain.terminal.rows, plain.terminal.cols, plain.argv.len()), (24, 80, 0));
        let vi =
            parse(&[("rows", "50"), ("argv", "vi"), ("argv", "a b"), ("term", "screen-256color")])
                .unwrap();
        assert_eq!((vi.terminal.rows, vi.argv), (50, vec!["vi".to_owned(), "a b".to_owned()]));
        for bad in [
            ("rows", "0"),
            ("cols", "-1"),
            ("cols", "70000"),
            ("term", "a b"),
            ("term", ""),
            ("x", "1"),
        ] {
            assert_eq!(parse(&[bad]), Err("invalid_query"), "{bad:?}");
        }
        assert_eq!(parse(&[("argv", "a\0b")]), Err("invalid_body"));
    }
}
