//! `/v1/sessions/{session}/pty`: a terminal in the session's sandbox, over a WebSocket; and how any terminal is asked
//! for.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{ExecRequest, Problem, SocketOut},
    bridge::Terminal,
};
use harvest_session::inside::TerminalOrder;

use crate::{
    ServerState,
    auth::Ending,
    extract::{Path, Query},
    problem::ApiError,
    socket::{self, Kind, Upgrade},
    valid,
};

/// Opens a terminal with a shell, or with another command, on it. Binary frames are bytes both ways; text
/// frames are JSON: `{"resize":{"rows":24,"cols":80}}` in, `{"exited":{…}}` out. A session that rests is
/// resumed for it. The terminal hangs up when the socket closes.
#[utoipa::path(get, path = "/v1/sessions/{session}/pty", tag = "sessions",
    params(
        ("session" = SessionId, Path, description = "The session"),
        ("rows" = Option<u16>, Query, description = "The terminal's height; 24 when absent", minimum = 1, maximum = 4096),
        ("cols" = Option<u16>, Query, description = "Its width; 80 when absent", minimum = 1, maximum = 4096),
        ("term" = Option<String>, Query, description = "The command's `TERM`; `xterm-256color` when absent"),
        ("argv" = Option<Vec<String>>, Query, description = "Program and arguments, one each; a shell when absent"),
        ("cwd" = Option<String>, Query, description = "Working folder; the primary checkout when absent"),
        ("user" = Option<String>, Query, description = "`harvest`, the default, or `root`"),
    ),
    responses((status = 101, body = SocketOut, description = "The terminal; the last text frame says how it ended"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no machine, and none could be started for this"),
        (status = 426, body = Problem, content_type = "application/problem+json",
            description = "The request is no upgrade to a WebSocket")))]
pub(crate) async fn pty_open(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Vec<(String, String)>>,
    Ending(ending): Ending,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let order = order(query)?;
    // Before the upgrade: what goes wrong up to here is a problem like any other.
    let (running, input) = state.sessions.inside(&session).await?.terminal(order).await?;
    Ok(upgrade
        .on_upgrade(|socket| socket::carry(socket, running, Some(input), Kind::Terminal, ending)))
}

/// A terminal as its query describes it.
pub(crate) fn order(query: Vec<(String, String)>) -> Result<TerminalOrder, ApiError> {
    let terminal = Terminal { rows: 24, cols: 80, term: None };
    let mut order = TerminalOrder { terminal, ..TerminalOrder::default() };
    for (name, value) in query {
        match name.as_str() {
            "rows" => order.terminal.rows = side(&value)?,
            "cols" => order.terminal.cols = side(&value)?,
            "term" => order.terminal.term = Some(term(value)?),
            "argv" => order.argv.push(value),
            "cwd" => order.cwd = Some(value),
            "user" => order.user = Some(value),
            _ => {
                return Err(ApiError::invalid(
                    "invalid_query",
                    format!("unknown parameter `{name}`"),
                ));
            }
        }
    }
    let TerminalOrder { argv, cwd, user, .. } = order.clone();
    let argv = if argv.is_empty() { vec!["sh".to_owned()] } else { argv };
    valid::exec(&ExecRequest { argv, cwd, user, ..ExecRequest::default() })?;
    Ok(order)
}

fn side(value: &str) -> Result<u16, ApiError> {
    value.parse().ok().filter(|side| (1..=4096).contains(side)).ok_or_else(|| {
        ApiError::invalid(
            "invalid_query",
            "a terminal's `rows` and `cols` are numbers from 1 to 4096",
        )
    })
}

fn term(value: String) -> Result<String, ApiError> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    match (1..=64).contains(&value.len()) && value.bytes().all(sound) {
        true => Ok(value),
        false => Err(ApiError::invalid(
            "invalid_query",
            "`term` is the name of a terminal, such as `xterm`",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(query: &[(&str, &str)]) -> Result<TerminalOrder, &'static str> {
        let query =
            query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        order(query).map_err(|error| error.code)
    }

    #[test]
    fn a_terminal_is_asked_for_with_sensible_words_only() {
        let plain = of(&[]).unwrap();
        assert_eq!((plain.terminal.rows, plain.terminal.cols, plain.argv.len()), (24, 80, 0));
        let vi =
            of(&[("rows", "50"), ("argv", "vi"), ("argv", "a b"), ("term", "screen-256color")])
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
            assert_eq!(of(&[bad]), Err("invalid_query"), "{bad:?}");
        }
        assert_eq!(of(&[("argv", "a\0b")]), Err("invalid_body"));
    }
}
