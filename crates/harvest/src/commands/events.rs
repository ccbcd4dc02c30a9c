//! `harvest events`: a session's events as they are, one JSON object per line, for programs.

use std::pin::pin;

use anyhow::{Result, bail};
use futures_util::StreamExt;
use harvest_proto::{Event, EventBody, SessionId};
use serde_json::json;

use crate::{Invocation, cli::Events, client::Client, follow::Update, printer::Advice, resolve, whole};

pub(crate) async fn run(here: &Invocation, args: &Events) -> Result<u8> {
    check(&args.types)?;
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &args.session).await?;
    let output = Output { here, args, client: &client, session: &session };
    if args.follow {
        output.follow().await?;
    } else {
        output.all().await?;
    }
    Ok(0)
}

struct Output<'a> {
    here: &'a Invocation,
    args: &'a Events,
    client: &'a Client,
    session: &'a SessionId,
}

impl Output<'_> {
    async fn all(&self) -> Result<()> {
        let mut after = self.args.after;
        loop {
            let page = self.client.events(self.session, after).await?;
            for event in page.items {
                after = event.seq;
                self.event(event).await?;
            }
            if page.next_cursor.is_none() {
                return Ok(());
            }
        }
    }

    async fn follow(&self) -> Result<()> {
        let mut updates = pin!(self.client.follow(self.session, self.args.after));
        let mut detach = pin!(tokio::signal::ctrl_c());
        loop {
            tokio::select! {
                _ = &mut detach => return Ok(()),
                update = updates.next() => match update {
                    Some(Ok(Update::Event(event))) => self.event(*event).await?,
                    Some(Ok(Update::Snapshot(_))) => {}
                    Some(Err(error)) => return Err(error),
                    None => return Ok(()),
                },
            }
        }
    }

    async fn event(&self, mut event: Event) -> Result<()> {
        if !is_wanted(&event.body, &self.args.types) {
            return Ok(());
        }
        if self.args.full {
            whole::fetch(self.client, self.session, &mut event.body).await?;
        }
        self.here.print.item(&event)
    }
}

fn is_wanted(body: &EventBody, types: &[String]) -> bool {
    let name = serde_json::to_value(body).unwrap_or_default();
    types.is_empty() || types.iter().any(|wanted| name["type"] == wanted.as_str())
}

/// A type that does not exist would print nothing for ever.
fn check(types: &[String]) -> Result<()> {
    for name in types {
        let Err(error) = serde_json::from_value::<EventBody>(json!({ "type": name })) else { continue };
        let error = error.to_string();
        // Anything else says that the type is known and has fields.
        if let Some(known) = error.strip_prefix(&format!("unknown variant `{name}`, expected one of ")) {
            bail!(Advice::new(format!("there is no event of type `{name}`"), format!("there are {known}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_that_does_not_exist_is_refused_with_those_that_do() {
        check(&["tool_ended".into(), "compacted".into()]).unwrap();
        let error = check(&["tool_edned".into()]).unwrap_err();
        assert!(crate::printer::hint_of(&error).unwrap().contains("`tool_ended`"), "{error}");
    }

    #[test]
    fn only_the_types_asked_for_are_wanted() {
        let text = EventBody::TextDelta { text: "x".into() };
        assert!(is_wanted(&text, &[]) && is_wanted(&text, &["text_delta".into()]));
        assert!(!is_wanted(&text, &["turn_ended".into()]));
    }
}
