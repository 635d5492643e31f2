//! The command line.

mod join;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

pub use join::JoinArgs;

/// Show and change the etcd clusters of etcd-operator.
///
/// Exit codes: 0 done; 1 failed; 2 wrong arguments; 3 refused or not confirmed, nothing changed; 4 a wait took too long;
/// 5 the awaited object failed. `ctl` ends with the exit code of etcdctl.
#[derive(Debug, Parser)]
#[command(name = "kubectl-etcd", bin_name = "kubectl etcd", version)]
pub struct Cli {
    /// Options that select the Kubernetes cluster and the namespace.
    #[command(flatten)]
    pub connection: Connection,
    /// The subcommand with its arguments.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that select the Kubernetes cluster and the namespace, as in kubectl.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// Namespace of the objects [default: the namespace of the context].
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub context: Option<String>,
    /// Path of the kubeconfig [default: KUBECONFIG, or ~/.kube/config].
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kubeconfig: Option<PathBuf>,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table.
    #[default]
    Table,
    /// A table with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// Options of commands that ask for a confirmation.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Consent {
    /// Do not ask for a confirmation.
    #[arg(short, long)]
    pub yes: bool,
    /// Show what the command would do, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Options of commands that can wait for the result.
#[derive(Clone, Debug, Args)]
pub struct Waiting {
    /// Wait for the result and show the progress.
    #[arg(short, long)]
    pub wait: bool,
    /// Time limit of --wait, such as 90s, 15m or 1h.
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = duration)]
    pub timeout: std::time::Duration,
}

fn duration(text: &str) -> Result<std::time::Duration, String> {
    let parsed = api::duration::DurationText(text.to_owned()).parse();
    parsed.ok_or_else(|| "use a duration such as 90s, 15m or 1h".to_owned())
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show members, leader, database, alarms, certificates, backups, and the next step of the operator.
    ///
    /// If you name a cluster, the command queries its members with etcdctl in the container of a member. Otherwise, the
    /// command lists all clusters with the values of their status.
    Status(StatusArgs),
    /// Run etcdctl in the container of a member, with endpoints and certificates set.
    ///
    /// If the cluster has authentication (spec.auth), the command runs the local etcdctl through a port-forward
    /// instead. The environment of etcdctl contains user and password of the Secret.
    Ctl(CtlArgs),
    /// Show the next step of the operator, what the operator waits for, and what blocks further changes.
    Plan(ClusterArgs),
    /// Change the version of etcd, if the operator allows this upgrade or downgrade.
    Upgrade(UpgradeArgs),
    /// Stop the operator from changing a cluster (spec.paused).
    Pause(ChangeArgs),
    /// End the pause of a cluster, so that the operator changes it again.
    Resume(ChangeArgs),
    /// Stop all members of a cluster and keep their volumes (spec.hibernate).
    Hibernate(ChangeAndWaitArgs),
    /// Start a hibernated cluster again.
    Wake(ChangeAndWaitArgs),
    /// Replace a member: delete its volume, so that the operator removes the member and adds a new member.
    Replace(ReplaceArgs),
    /// Defragment the members one at a time, the leader last.
    Defrag(DefragArgs),
    /// Compact the history of a cluster.
    Compact(CompactArgs),
    /// Move leadership to another member.
    MoveLeader(MoveLeaderArgs),
    /// Show what a recovery of a lost quorum would lose, and approve the recovery.
    Recover(ChangeAndWaitArgs),
    /// Make a backup now, in the store of an existing EtcdBackup or in the store that the options name.
    Backup(BackupArgs),
    /// Restore a cluster from a backup.
    Restore(RestoreArgs),
    /// Show how the operator verified a backup, or test the backup with a restore into a temporary cluster.
    Verify(VerifyArgs),
    /// Move an existing etcd into a new EtcdCluster: new members join the existing etcd and replace its members.
    ///
    /// The command creates the EtcdCluster with the annotation `etcd.database.coreos.com/join`. If the EtcdCluster
    /// exists and joins the same etcd, the command changes nothing. With `--wait`, it waits until the members have
    /// moved. `--finish` removes the annotation after the move.
    Join(JoinArgs),
    /// Show the logs of the members or of the operators.
    Logs(LogsArgs),
    /// Show the Events of a cluster, its pods, volumes, backups and restores.
    Events(EventsArgs),
    /// Write a support bundle without Secrets: objects, status, Events and logs.
    Report(ReportArgs),
    /// Print the completion script for a shell.
    Completion(CompletionArgs),
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Name of the EtcdCluster [default: all clusters of the namespace].
    #[arg(value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// List the clusters of all namespaces.
    #[arg(short = 'A', long, conflicts_with = "cluster")]
    pub all_namespaces: bool,
    /// Format of the output.
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Output,
    /// Do not query the members. Show the status that the operator has written.
    #[arg(long)]
    pub offline: bool,
}

/// Arguments of `ctl`.
#[derive(Debug, Args)]
pub struct CtlArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Member in whose container etcdctl runs [default: a ready voter].
    #[arg(long, value_name = "MEMBER")]
    pub member: Option<String>,
    /// Pass standard input to etcdctl.
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Run the local etcdctl through a port-forward to the member.
    #[arg(long)]
    pub local: bool,
    /// Arguments of etcdctl, after `--`.
    #[arg(last = true, required = true, value_name = "ARGS")]
    pub args: Vec<String>,
}

/// Arguments of commands that only name a cluster.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
}

/// Arguments of `upgrade`.
#[derive(Debug, Args)]
pub struct UpgradeArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Target version, such as 3.6.16.
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Arguments of `pause` and `resume`.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
}

/// Arguments of `hibernate`, `wake` and `recover`.
#[derive(Debug, Args)]
pub struct ChangeAndWaitArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Arguments of `replace`.
#[derive(Debug, Args)]
pub struct ReplaceArgs {
    /// Name of the member, which is the name of its pod.
    pub member: String,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Arguments of `defrag`.
#[derive(Debug, Args)]
pub struct DefragArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Defragment only this member.
    #[arg(long, value_name = "MEMBER")]
    pub member: Option<String>,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
}

/// Arguments of `compact`.
#[derive(Debug, Args)]
pub struct CompactArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Number of the newest revisions to keep. There is no default, because only you know which history clients need.
    #[arg(long, value_name = "REVISIONS")]
    pub keep: u64,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
}

/// Arguments of `move-leader`.
#[derive(Debug, Args)]
pub struct MoveLeaderArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// The member that becomes the leader [default: the healthy voter with the newest log].
    #[arg(long, value_name = "MEMBER")]
    pub to: Option<String>,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
}

/// Arguments of `backup`.
#[derive(Debug, Args)]
pub struct BackupArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// EtcdBackup whose store and Secret are used [default: the EtcdBackup of this cluster with the newest backup].
    #[arg(long, value_name = "ETCDBACKUP", conflicts_with_all = ["s3", "pvc"])]
    pub from: Option<String>,
    /// Name of the new EtcdBackup [default: the cluster, `manual`, and the time].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Store the backup in S3, at BUCKET/KEY.
    #[arg(long, value_name = "BUCKET/KEY", conflicts_with = "pvc")]
    pub s3: Option<String>,
    /// Secret with the credentials for --s3.
    #[arg(long, value_name = "SECRET", requires = "s3")]
    pub aws_secret: Option<String>,
    /// Endpoint of the store for --s3, if the store is not AWS. Requests have the bucket in the path of the URL.
    #[arg(long, value_name = "URL", requires = "s3")]
    pub endpoint: Option<String>,
    /// Store the backup on a PersistentVolumeClaim, at CLAIM/PATH.
    #[arg(long, value_name = "CLAIM/PATH")]
    pub pvc: Option<String>,
    /// Compress the backup with Zstandard.
    #[arg(long)]
    pub zstd: bool,
    /// Secret with the keys that encrypt the backup [default: the Secret of the EtcdBackup whose store is used].
    #[arg(long, value_name = "SECRET")]
    pub encryption_secret: Option<String>,
    /// Entry of the Secret that contains the encryption key. Required if the Secret has several entries.
    #[arg(long, value_name = "ENTRY", requires = "encryption_secret")]
    pub encryption_key: Option<String>,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Arguments of `restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Name of the EtcdCluster to restore. A new name creates a copy of the cluster.
    pub cluster: String,
    /// EtcdBackup that made the backup.
    #[arg(long, value_name = "ETCDBACKUP")]
    pub from: String,
    /// Restore the newest backup that was complete at this time, such as 2026-11-20T18:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub before: Option<jiff::Timestamp>,
    /// Name of the new EtcdRestore [default: the cluster, `restore`, and the time].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Replace the data of a cluster that exists. Writes after the backup are lost.
    #[arg(long)]
    pub overwrite: bool,
    /// With --overwrite: keep the old volumes for at least this time, such as 24h.
    #[arg(long, value_name = "DURATION", requires = "overwrite", value_parser = duration_text)]
    pub keep_old_data: Option<String>,
    /// Raise the revision of the restored cluster by this number, and mark the skipped revisions as compacted. Use this
    /// option for clients that cache or watch keys.
    #[arg(long, value_name = "REVISIONS")]
    pub bump_revision: Option<i64>,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}

fn parse_time(text: &str) -> Result<jiff::Timestamp, String> {
    text.parse()
        .map_err(|_| "use a time such as 2026-11-20T18:00:00Z".to_owned())
}

fn duration_text(text: &str) -> Result<String, String> {
    duration(text).map(|_| text.to_owned())
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Name of the EtcdBackup.
    pub backup: String,
    /// Test the newest backup: restore it into a temporary cluster of one member, compare the revision, and delete the
    /// temporary cluster.
    #[arg(long)]
    pub rehearse: bool,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Time limit of the rehearsal, such as 15m.
    #[arg(long, value_name = "DURATION", default_value = "30m", value_parser = duration)]
    pub timeout: std::time::Duration,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Show only the log of this member.
    #[arg(long, value_name = "MEMBER", conflicts_with = "operators")]
    pub member: Option<String>,
    /// Show the operators' log lines that name the cluster.
    #[arg(long)]
    pub operators: bool,
    /// Follow the logs until you stop the command.
    #[arg(short, long, conflicts_with_all = ["previous", "operators"])]
    pub follow: bool,
    /// Show the logs of the containers before their last restart.
    #[arg(short, long)]
    pub previous: bool,
    /// Number of last log lines of each container.
    #[arg(long, value_name = "LINES", default_value_t = 100)]
    pub tail: i64,
    /// Namespace of the operators [default: all namespaces].
    #[arg(long, value_name = "NAMESPACE", requires = "operators")]
    pub operator_namespace: Option<String>,
}

/// Arguments of `events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// Show only Warning Events.
    #[arg(long)]
    pub warnings: bool,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Name of the EtcdCluster.
    pub cluster: String,
    /// File to write [default: etcd-report-NAMESPACE-CLUSTER-TIME.tar.gz].
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// Number of the last lines of each log.
    #[arg(long, value_name = "LINES", default_value_t = 5_000)]
    pub tail: i64,
}

/// Arguments of `completion`.
#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_after_two_dashes_belong_to_etcdctl() {
        let line = "kubectl-etcd -n prod ctl main -- get --prefix k -n 5";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Ctl(args) = cli.command else {
            panic!("another command")
        };
        assert_eq!(args.args, ["get", "--prefix", "k", "-n", "5"]);
        assert_eq!(cli.connection.namespace.as_deref(), Some("prod"));
    }

    #[test]
    fn malformed_durations_and_times_are_rejected() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        assert!(parse("kubectl-etcd wake main --wait --timeout 90s"));
        assert!(!parse("kubectl-etcd wake main --wait --timeout soon"));
        assert!(parse(
            "kubectl-etcd restore main --from a --before 2026-11-20T18:00:00Z"
        ));
        assert!(!parse(
            "kubectl-etcd restore main --from a --before yesterday"
        ));
    }
}
