//! Tools about the session itself: its state, its pull requests, and what keeps it from going on.

use harvest_gateway::ledger::ToolResult;
use harvest_proto::{
    EventBody, PromptText, RepositoryRef, SessionId,
    api::{PullRequest, Session},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    SessionTools, ToolError, arguments,
    definition::{Definition, Effect, text, texts},
    document,
};
use crate::{repositories::PullRequestText, tool_host::ChildSpec};

// A report is read by a person; its texts are stored as an event.
const MAX_TEXT_CHARACTERS: usize = 4000;
const MAX_ATTEMPTS: usize = 20;
const MAX_REPORT_BYTES: usize = 48 * 1024;
const MAX_TITLE_CHARACTERS: usize = 200;
const MAX_BODY_CHARACTERS: usize = 30_000;

pub(super) const DEFINITIONS: [Definition; 4] = [
    Definition {
        name: "session_status",
        description: "Read the state of this session, or of one that you created: its branch, \
                      turns, tokens and pull requests",
        effect: Effect::Reads,
        arguments: &[],
        optional: &[("session", || text("The id of the session [default: this one]"))],
    },
    Definition {
        name: "spawn_session",
        description: "Create another session, with a sandbox and an agent of its own, for a part \
                      of the work. It delivers a pull request; session_status shows its state. \
                      At most 5 at once and 15 in all",
        effect: Effect::Adds,
        arguments: &[
            ("prompt", || text("What the session has to do, with everything it has to know")),
            ("key", || text("A name for this work; a repeated call with it creates nothing")),
        ],
        optional: &[("repository", || {
            text("A registered repository: OWNER/NAME [default: the first of this session]")
        })],
    },
    Definition {
        name: "create_pull_request",
        description: "Open the pull request of the branch you pushed, or change its title and \
                      description. Without this call one is opened after your turn",
        effect: Effect::Adds,
        arguments: &[],
        optional: &[
            ("title", || text("The title [default: the title of the session]")),
            ("body", || text("The description in Markdown [default: the first prompt]")),
        ],
    },
    Definition {
        name: "report_blocked",
        description: "Report that you cannot go on without a person. Use it only after you tried \
                      what you can; then end your turn",
        effect: Effect::Adds,
        arguments: &[
            ("criterion", || text("What you cannot fulfil")),
            ("error", || text("The error in the way, as it was printed")),
            ("attempts", || texts("What you tried")),
            ("needed_action", || text("What a person has to do")),
        ],
        optional: &[("checkpoint", || text("Where your work so far is, such as a pushed commit"))],
    },
];

/// Calls a tool of this file; `None` when it is none.
pub(super) async fn call(
    tools: &SessionTools,
    name: &str,
    given: &Value,
) -> Option<Result<ToolResult, ToolError>> {
    Some(match name {
        "session_status" => status(tools, given.clone()).await,
        "spawn_session" => spawn(tools, given.clone()).await,
        "create_pull_request" => create_pull_request(tools, given.clone()).await,
        "report_blocked" => report_blocked(tools, given.clone()).await,
        _ => return None,
    })
}

async fn status(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    #[derive(Deserialize)]
    struct Wanted {
        session: Option<SessionId>,
    }
    let Wanted { session } = arguments(given)?;
    let wanted = session.as_ref().unwrap_or(&tools.session);
    let status = describe(&tools.host()?.relative(&tools.session, wanted).await?);
    Ok(document(&status, status.clone()))
}

async fn spawn(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    #[derive(Deserialize)]
    struct Wanted {
        prompt: PromptText,
        key: String,
        repository: Option<RepositoryRef>,
    }
    let Wanted { prompt, key, repository } = arguments(given)?;
    let child = ChildSpec { prompt, key, repository };
    let (host, parent) = (tools.host()?, tools.session.clone());
    let created = tools.detach(async move { host.spawn_child(&parent, child).await }).await?;
    let child = describe(&created);
    Ok(document(&child, child.clone()))
}

/// What an agent may know of a session.
fn describe(session: &Session) -> Value {
    let pulls = session.repositories.iter().filter_map(|one| one.pr.as_ref());
    json!({
        "session": session.id,
        "title": session.title,
        "state": session.state,
        "reason": session.reason,
        "repositories": session.repositories.iter().map(|one| &one.name).collect::<Vec<_>>(),
        "branch": session.branch,
        "turns": session.turns,
        "queued_prompts": session.queued,
        "usage": session.usage,
        "pull_requests": pulls.map(describe_pull_request).collect::<Vec<_>>(),
    })
}

fn describe_pull_request(pull: &PullRequest) -> Value {
    let check = pull.evidence.as_ref().map(|evidence| evidence.outcome);
    json!({
        "number": pull.number,
        "url": pull.url,
        "title": pull.title,
        "state": pull.state,
        "commit": pull.commit,
        "check": check,
    })
}

async fn create_pull_request(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    #[derive(Deserialize)]
    struct Wanted {
        title: Option<String>,
        body: Option<String>,
    }
    let Wanted { title, body } = arguments(given)?;
    let title = title.as_deref().map(|title| within("title", title, MAX_TITLE_CHARACTERS));
    let body = body.as_deref().map(|body| within("body", body, MAX_BODY_CHARACTERS));
    let (title, summary) = (title.transpose()?, body.transpose()?);
    let text = PullRequestText { title, summary, ..Default::default() };
    // Each call can store an event.
    tools.check_history().await?;
    let (repositories, session) = (tools.shared.repositories.clone(), tools.session.clone());
    let opening = async move { repositories.open_pull_requests(&session, &text).await };
    let pulls = tools.detach(opening).await?;
    if pulls.is_empty() {
        let why = "there is no pull request to open; commit your work and run `git push` first";
        return Err(ToolError::Refused(why.to_owned()));
    }
    let pulls = Value::Array(pulls.iter().map(describe_pull_request).collect());
    Ok(document(&pulls, json!({ "pull_requests": pulls })))
}

async fn report_blocked(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    tools.host()?.report_blocked(&tools.session, blocked(given)?).await?;
    let text = "Reported. End your turn now; the next prompt is the answer".to_owned();
    Ok(ToolResult { text, structured: Some(json!({ "reported": true })), failed: false })
}

/// The event of a report whose texts, and all of them together, are within their limits.
fn blocked(given: Value) -> Result<EventBody, ToolError> {
    #[derive(Deserialize)]
    struct Report {
        criterion: String,
        error: String,
        attempts: Vec<String>,
        checkpoint: Option<String>,
        needed_action: String,
    }
    let report: Report = arguments(given)?;
    let long = |name, text: &str| within(name, text, MAX_TEXT_CHARACTERS);
    if report.attempts.len() > MAX_ATTEMPTS {
        return Err(ToolError::Refused(format!("at most {MAX_ATTEMPTS} attempts are reported")));
    }
    let attempts =
        report.attempts.iter().map(|one| long("attempts", one)).collect::<Result<_, _>>();
    let event = EventBody::Blocked {
        criterion: long("criterion", &report.criterion)?,
        error: long("error", &report.error)?,
        attempts: attempts?,
        checkpoint: report.checkpoint.as_deref().map(|at| long("checkpoint", at)).transpose()?,
        needed_action: long("needed_action", &report.needed_action)?,
    };
    if serde_json::to_vec(&event)?.len() > MAX_REPORT_BYTES {
        let why = format!("the report has more than {MAX_REPORT_BYTES} bytes; shorten it");
        return Err(ToolError::Refused(why));
    }
    Ok(event)
}

/// A text that is neither empty nor too long.
pub(crate) fn within(name: &str, text: &str, max: usize) -> Result<String, ToolError> {
    let text = text.trim();
    let problem = match text.chars().count() {
        0 => "is empty".to_owned(),
        length if length > max => format!("has more than {max} characters"),
        _ => return Ok(text.to_owned()),
    };
    Err(ToolError::Refused(format!("`{name}` {problem}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_trimmed_and_bounded() {
        assert_eq!(within("title", " Fix it\n", 10).unwrap(), "Fix it");
        assert_eq!(within("title", " \n", 10).unwrap_err().to_string(), "`title` is empty");
        let long = within("title", "ÄÖÜ", 2).unwrap_err().to_string();
        assert_eq!(long, "`title` has more than 2 characters");
    }

    #[test]
    fn whole_blocked_report_is_bounded() {
        let report = |attempts: usize, attempt: &str| {
            blocked(json!({
                "criterion": "It builds",
                "error": "no network",
                "attempts": vec![attempt; attempts],
                "needed_action": "Allow example.org",
            }))
        };
        let full = "x".repeat(MAX_TEXT_CHARACTERS);
        assert!(report(12, &full).is_ok());
        for (attempts, attempt) in [(13, full.as_str()), (12, &full.replace('x', "\u{1}"))] {
            let refused = report(attempts, attempt).unwrap_err().to_string();
            assert_eq!(refused, "the report has more than 49152 bytes; shorten it");
        }
    }

    #[test]
    fn optional_arguments_are_not_required() {
        let [_, _, pull_request, blocked] = DEFINITIONS.map(|definition| definition.to_json());
        assert_eq!(pull_request["inputSchema"]["required"], json!([]));
        assert_eq!(blocked["inputSchema"]["required"].as_array().unwrap().len(), 4);
        assert!(blocked["inputSchema"]["properties"]["checkpoint"].is_object());
    }
}
