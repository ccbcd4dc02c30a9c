//! `harvest budget`: shows and sets what model calls may cost.

use anyhow::Result;
use harvest_proto::{
    Money,
    api::{Budget, Session, SessionState, SetBudget},
};
use reqwest::Method;

use crate::{
    Invocation,
    cli::{BudgetArgs, units::Amount},
    client::Client,
    printer::Advice,
};

pub(crate) async fn run(ctx: &Invocation, args: BudgetArgs) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    let BudgetArgs { mut arguments, repository, user, day } = args;
    let path = match (&repository, &user, day) {
        (Some(name), ..) => {
            format!("/v1/repositories/{}/budget", client.repository(name).await?.name)
        }
        (_, Some(email), _) => format!("/v1/users/{}/budget", escaped(email)),
        (.., true) => "/v1/budgets/day".to_owned(),
        _ if arguments.is_empty() => return list(ctx, &client).await,
        _ => return session(ctx, &client, &arguments).await,
    };
    let amount: Amount = match (arguments.pop(), arguments.is_empty()) {
        (Some(amount), true) => amount.parse()?,
        _ => anyhow::bail!(Advice::usage("no amount given", AMOUNT)),
    };
    let budget: Budget = set(&client, &path, amount).await?;
    ctx.print.result(&budget, |budget| describe(budget) + "\n")?;
    Ok(0)
}

const AMOUNT: &str = "write it in dollars: `harvest budget --day 20`; `none` removes the limit";

async fn list(ctx: &Invocation, client: &Client) -> Result<u8> {
    let budgets: Vec<Budget> = client.all("/v1/budgets").await?;
    ctx.print.list(&budgets, ["SCOPE", "NAME…", "SPENT", "BUDGET"], |one| {
        [
            one.scope.to_string(),
            one.name.clone(),
            one.spent_micros.to_string(),
            limit(one.budget_micros),
        ]
    })?;
    Ok(0)
}

async fn session(ctx: &Invocation, client: &Client, arguments: &[String]) -> Result<u8> {
    let [typed, amount @ ..] = arguments else { unreachable!("the caller has checked it") };
    let id = ctx.session(typed).await?.1;
    let shown: Session = match amount {
        [] => client.session(&id).await?,
        [amount] => set(client, &format!("/v1/sessions/{id}/budget"), amount.parse()?).await?,
        _ => anyhow::bail!(Advice::usage("more than one amount given", AMOUNT)),
    };
    ctx.print.result(&shown, |shown| {
        let spent = format!("{} of {}", shown.spent_micros, limit(shown.budget_micros));
        format!("{id}: {spent} spent\n")
    })?;
    let goes_on = matches!(
        shown.state,
        SessionState::Queued | SessionState::Starting | SessionState::Running
    );
    if goes_on && !amount.is_empty() {
        ctx.print.hint(format!("`harvest attach {id}` follows it"));
    }
    Ok(0)
}

async fn set<T: serde::de::DeserializeOwned>(
    client: &Client,
    path: &str,
    amount: Amount,
) -> Result<T> {
    let body = SetBudget { budget_micros: amount.0 };
    client.call(client.request(Method::PUT, path).json(&body)).await
}

/// A part of a path, with everything escaped that could end it.
pub(super) fn escaped(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'.' | b'_' | b'-' | b'@' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(escape).collect()
}

fn limit(limit: Option<Money>) -> String {
    limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string())
}

fn describe(budget: &Budget) -> String {
    let Budget { scope, name, spent_micros, budget_micros, .. } = budget;
    format!("{scope} {name}: {spent_micros} of {} spent", limit(*budget_micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_escaped_in_paths() {
        assert_eq!(escaped("ada+x@example.org"), "ada%2Bx@example.org");
        assert_eq!(escaped("a/../b?c#d é"), "a%2F..%2Fb%3Fc%23d%20%C3%A9");
    }
}
