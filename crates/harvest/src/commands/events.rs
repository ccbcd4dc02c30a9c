//! `harvest events`: prints a session's events unchanged, one JSON object per line.

use anyhow::{Result, bail};
use futures_util::StreamExt;
use harvest_proto::EventBody;
use serde_json::json;

use crate::{Invocation, blob_fetch, cli::EventsArgs, follow::Update, printer::Advice};

pub(crate) async fn run(ctx: &Invocation, args: &EventsArgs) -> Result<u8> {
    check(&args.types)?;
    let (client, session) = ctx.session(&args.session).await?;
    let mut updates = client.events_after(&session, args.after, args.follow);
    while let Some(update) = updates.next().await {
        let Update::Event(mut event) = update? else { continue };
        if !is_wanted(&event.body, &args.types) {
            continue;
        }
        if args.full {
            blob_fetch::fetch(&client, &session, &mut event.body).await?;
        }
        ctx.print.item(&event)?;
    }
    Ok(0)
}

fn is_wanted(body: &EventBody, types: &[String]) -> bool {
    let name = serde_json::to_value(body).unwrap_or_default();
    types.is_empty() || types.iter().any(|wanted| name["type"] == wanted.as_str())
}

/// Refuses an unknown type, which would never match.
fn check(types: &[String]) -> Result<()> {
    for name in types {
        let Err(error) = serde_json::from_value::<EventBody>(json!({ "type": name })) else {
            continue;
        };
        let error = error.to_string();
        // Any other error means that the type is known and has fields.
        if let Some(known) =
            error.strip_prefix(&format!("unknown variant `{name}`, expected one of "))
        {
            bail!(Advice::new(
                format!("there is no event type `{name}`"),
                format!("event types: {known}")
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_type_is_refused_with_known_ones() {
        check(&["tool_ended".into(), "compacted".into()]).unwrap();
        let error = check(&["tool_edned".into()]).unwrap_err();
        assert!(crate::printer::hint_of(&error).unwrap().contains("`tool_ended`"), "{error}");
    }

    #[test]
    fn only_requested_types_match() {
        let text = EventBody::TextDelta { text: "x".into() };
        assert!(is_wanted(&text, &[]) && is_wanted(&text, &["text_delta".into()]));
        assert!(!is_wanted(&text, &["turn_ended".into()]));
    }
}
