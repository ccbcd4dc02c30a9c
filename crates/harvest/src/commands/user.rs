//! `harvest user`: shows users, and sets what members may use for sandboxes of their own.

use std::time::Duration;

use anyhow::{Result, bail};
use harvest_proto::api::{Role, SetUserLimits, User, UserLimits};
use reqwest::Method;

use super::budget::escaped;
use crate::{
    Invocation,
    cli::{SetUserArgs, UserCommand, units::bytes},
    client::Client,
    printer::Advice,
};

pub(crate) async fn run(ctx: &Invocation, verb: UserCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        UserCommand::Ls => list(ctx, &client).await,
        UserCommand::Set(args) => set(ctx, &client, args).await,
    }
}

async fn list(ctx: &Invocation, client: &Client) -> Result<u8> {
    let users: Vec<User> = client.all("/v1/users").await?;
    let columns = ["USER…", "ROLE", "SANDBOXES", "MEMORY", "CPUS", "DISK", "LIFETIME"];
    ctx.print.list(&users, columns, |one| {
        let role = one.role.map_or("no token", |role| role.as_str());
        let [sandboxes, memory, cpus, disk, lifetime] = match one.role {
            // The limits are for requests with a member's token.
            Some(Role::Admin) => std::array::from_fn(|_| "no limit".to_owned()),
            Some(Role::Member) | None => words(&one.limits),
        };
        [one.user.email.clone(), role.to_owned(), sandboxes, memory, cpus, disk, lifetime]
    })?;
    Ok(0)
}

async fn set(ctx: &Invocation, client: &Client, args: SetUserArgs) -> Result<u8> {
    if !args.email.contains('@') {
        let hint = "users are known by their e-mail address: `harvest user ls`";
        bail!(Advice::usage(format!("`{}` is not an e-mail address", args.email), hint));
    }
    let path = format!("/v1/users/{}/limits", escaped(&args.email));
    let change = change(&args);
    let request = client.request(Method::PATCH, &path).json(&change);
    let limits: UserLimits = client.call(request).await?;
    ctx.print.result(&limits, |limits| {
        let [sandboxes, memory, cpus, disk, lifetime] = words(limits);
        format!(
            "{}: sandboxes at once: {sandboxes}; each: {memory} of memory, {cpus} cores, {disk} of \
             disk, for {lifetime}\n",
            args.email
        )
    })?;
    Ok(0)
}

fn change(args: &SetUserArgs) -> SetUserLimits {
    fn given<T>(value: Option<T>, defaults: bool) -> Option<Option<T>> {
        value.map(Some).or(defaults.then_some(None))
    }
    SetUserLimits {
        sandboxes: given(args.sandboxes, args.defaults),
        memory_bytes: given(args.memory.map(|size| size.0), args.defaults),
        cpu_millis_per_second: given(args.cpus.map(|cores| cores.millis()), args.defaults),
        writable_bytes: given(args.disk.map(|size| size.0), args.defaults),
        lifetime_secs: given(args.lifetime.map(|time| time.as_secs().max(1)), args.defaults),
    }
}

fn words(limits: &UserLimits) -> [String; 5] {
    let size = |count: u64| match count {
        count if count % (1 << 30) == 0 => format!("{}g", count >> 30),
        count if count % (1 << 20) == 0 => format!("{}m", count >> 20),
        count => bytes(count),
    };
    let cores = f64::from(limits.cpu_millis_per_second) / 1000.0;
    [
        limits.sandboxes.to_string(),
        size(limits.memory_bytes),
        cores.to_string(),
        size(limits.writable_bytes),
        humantime::format_duration(Duration::from_secs(limits.lifetime_secs)).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SetUserArgs {
        SetUserArgs {
            email: "ada@example.org".to_owned(),
            sandboxes: Some(4),
            memory: None,
            cpus: None,
            disk: None,
            lifetime: None,
            defaults: false,
        }
    }

    #[test]
    fn limits_not_given_stay_or_get_defaults() {
        let stays = change(&args());
        assert_eq!(stays, SetUserLimits { sandboxes: Some(Some(4)), ..SetUserLimits::default() });
        let defaults = change(&SetUserArgs { defaults: true, ..args() });
        assert_eq!((defaults.sandboxes, defaults.memory_bytes), (Some(Some(4)), Some(None)));
    }
}
