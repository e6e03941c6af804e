{{/* Role of the pods with further ranks of a worker. Services, routers and autoscalers do not count them: (role). */}}
{{- define "diptych.rankRole" -}}
{{- .role }}-ranks
{{- end }}

{{/* Labels that select all pods of a pool with rankHosts: (root, role, name). */}}
{{- define "diptych.ranksSelector" -}}
matchLabels:
  {{- include "diptych.selectorLabels" (omit . "role") | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [{{ .role }}, {{ include "diptych.rankRole" . }}]}
{{- end }}

{{/* Workload type of a pool, as YAML {apiVersion, kind}: (pool). */}}
{{- define "diptych.workload" -}}
{{- if gt (int .pool.rankHosts) 1 }}
{{- toYaml (dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet") }}
{{- else }}
{{- toYaml (dict "apiVersion" "apps/v1" "kind" "Deployment") }}
{{- end }}
{{- end }}

{{/*
Ports of a worker, as YAML {control, kv, http, lend, ranks}. On the host network each pool has its own, because pods of several
pools may share a node: (root, role, pool).
*/}}
{{- define "diptych.ports" -}}
{{- $first := 7001 }}
{{- if .pool.hostNetwork }}
{{- $hash := printf "%s/%s-%s-%s" .root.Release.Namespace (include "diptych.fullname" .root) .role .pool.name | adler32sum | int64 }}
{{- $first = .pool.hostPort | default (add 20000 (mul 5 (mod $hash 2000))) }}
{{- end }}
{{- range $i, $name := list "control" "kv" "http" "lend" "ranks" }}
{{ $name }}: {{ ternary 7010 (add $first $i) (and (eq $name "kv") (eq (include "diptych.hasRankPorts" (dict "pool" $.pool)) "true")) }}
{{- end }}
{{- end }}

{{/* "true" if each rank of a pool receives KV at its own port, from 7010 on: (pool). */}}
{{- define "diptych.hasRankPorts" -}}
{{- if and (eq (.pool.engine | default "diptych") "vllm") (gt (int .pool.tensorParallelSize) 1) }}true{{ end }}
{{- end }}

{{/* Roles of the pods of workers of `roles` that exchange KV, separated by spaces: (root, roles). */}}
{{- define "diptych.kvRoles" -}}
{{- $found := .roles }}
{{- range $role := .roles }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role) | fromYaml).pools }}
{{- if gt (int .rankHosts) 1 }}{{ $found = append $found (include "diptych.rankRole" (dict "role" $role)) }}{{ end }}
{{- end }}
{{- end }}
{{- uniq $found | join " " }}
{{- end }}

{{/* Ports of a NetworkPolicy on which pods receive KV: (root). */}}
{{- define "diptych.kvPorts" -}}
{{- $ports := list }}
{{- $most := 0 }}
{{- range (include "diptych.pools" (dict "root" .root "role" "decode") | fromYaml).pools }}
{{- if include "diptych.hasRankPorts" (dict "pool" .) }}{{ $most = max $most (int .tensorParallelSize) }}
{{- else }}{{ $ports = list "{port: 7002, protocol: TCP}" }}{{ end }}
{{- end }}
{{- if $most }}{{ $ports = append $ports (printf "{port: 7010, endPort: %d, protocol: TCP}" (add 7009 $most)) }}{{ end }}
{{- printf "[%s]" (join ", " $ports) }}
{{- end }}

{{/* Refuses equal ports of two pools on the host network: (root). */}}
{{- define "diptych.checkHostPorts" -}}
{{- $taken := dict }}
{{- range $role := list "prefill" "decode" }}
{{- range $pool := (include "diptych.pools" (dict "root" $.root "role" $role) | fromYaml).pools }}
{{- $for := printf "%s pool %s" $role $pool.name }}
{{- if and $pool.hostPort (not $pool.hostNetwork) }}{{ fail (printf "%s: hostPort %d needs hostNetwork" $for (int $pool.hostPort)) }}{{ end }}
{{- range $_, $port := ternary (include "diptych.ports" (dict "root" $.root "role" $role "pool" $pool) | fromYaml) dict (eq (toString $pool.hostNetwork) "true") }}
{{- $port = int $port | toString }}
{{- if hasKey $taken $port }}{{ fail (printf "%s and %s both use port %s of their nodes: set hostPort of one of them, the first of five free ports" (get $taken $port) $for $port) }}{{ end }}
{{- $_ := set $taken $port $for }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Devices of a pod: one for each of its ranks: (pool). */}}
{{- define "diptych.devices" -}}
{{- div (int .pool.tensorParallelSize) (int .pool.rankHosts) }}
{{- end }}

{{/* Refuses a number of hosts that does not divide the ranks evenly: (pool, for). */}}
{{- define "diptych.checkRankHosts" -}}
{{- $size := int .pool.tensorParallelSize }}
{{- $hosts := int .pool.rankHosts }}
{{- if and (gt $hosts 1) (ne (.pool.engine | default "diptych") "vllm") }}
{{- fail (printf "%s: rankHosts is %d, but only workers with engine vllm run in several pods: set engine vllm or rankHosts 1" .for $hosts) }}
{{- end }}
{{- if mod $size $hosts }}
{{- $divisors := list }}
{{- range $number := untilStep 1 (int (add1 $size)) 1 }}{{ if eq (mod $size $number) 0 }}{{ $divisors = append $divisors (toString $number) }}{{ end }}{{ end }}
{{- fail (printf "%s: tensorParallelSize %d is not divisible by rankHosts %d, but each host runs the same number of ranks: use %s" .for $size $hosts (join ", " $divisors)) }}
{{- end }}
{{- end }}

{{/* Draft model of a pool that is not a folder or file of its pods and therefore fetched, or "": (root, role, pool). */}}
{{- define "diptych.fetchedDraft" -}}
{{- $decodes := ternary .pool.settings (ternary .root.Values.decode.defaults.settings dict (eq (toString .pool.settings.role_change) "true")) (eq .role "decode") }}
{{- $draft := ($decodes | default dict).draft_model | default "" }}
{{- if not (hasPrefix "/" $draft) }}{{ $draft }}{{ end }}
{{- end }}

{{/*
Pod of a worker or of another host of its ranks, which has the same model, devices and scheduling: (root, role, pool, name,
scope, settings, toml, isRankHost).
*/}}
{{- define "diptych.workerPod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $pool := .pool }}
{{- $name := .name }}
{{- $scope := .scope }}
{{- $settings := .settings }}
{{- $toml := .toml }}
{{- $isRankHost := .isRankHost }}
{{- $ports := include "diptych.ports" (dict "root" $root "role" $role "pool" $pool) | fromYaml }}
{{- $model := include "diptych.model" (dict "root" $root "name" $pool.model "for" $pool.name) | fromYaml }}
metadata:
  labels:
    {{- include "diptych.labels" (merge (dict "pod" true "extra" $pool.podLabels) $scope) | nindent 4 }}
  annotations:
    {{- $annotations := dict "checksum/config" (sha256sum $toml) }}
    {{- if and $root.Values.monitoring.scrapeAnnotations (not $isRankHost) }}
    {{- $scrape := dict "prometheus.io/scrape" "true" "prometheus.io/port" (int $ports.http | toString) "prometheus.io/path" "/metrics" }}
    {{- $annotations = merge $annotations $scrape }}
    {{- end }}
    {{- toYaml (mustMergeOverwrite $annotations (mustDeepCopy $pool.podAnnotations)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "diptych.serviceAccountName" (dict "root" $root "kind" "worker") }}
  automountServiceAccountToken: {{ $root.Values.podDeletionCost.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (int $pool.preStopSeconds) (int $pool.drainSeconds) 15 }}
  {{- with include "diptych.scheduling" (merge (dict "spec" $pool) (omit $scope "model")) }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- $draft := include "diptych.fetchedDraft" (dict "root" $root "role" $role "pool" $pool) }}
  {{- if or $pool.initContainers (eq $model.source.type "hub") $draft }}
  initContainers:
    {{- with $pool.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if eq $model.source.type "hub" }}
    {{- include "diptych.fetchContainer" (dict "root" $root "kind" "worker" "model" $model "spec" $pool) | nindent 4 }}
  {{- end }}
  {{- with $draft }}
    {{- $source := merge (dict "type" "hub" "id" .) (pick $model.source "tokenSecret") }}
    {{- include "diptych.fetchContainer" (dict "root" $root "kind" "worker" "model" (dict "name" $model.name "source" $source) "spec" $pool "container" "fetch-draft-model") | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "rank-host" "worker" $isRankHost }}
      {{- include "diptych.imageOf" (dict "root" $root "kind" "worker" "image" $pool.image "vendor" $pool.accelerator.vendor "transport" $settings.kv_transport "engine" $pool.engine) | nindent 6 }}
      {{- if $isRankHost }}
      command: [diptych, rank-host]
      args: [--config, /etc/diptych/config/diptych.toml, "--leader=$(LWS_LEADER_ADDRESS):{{ int $ports.ranks }}"]
      {{- else }}
      command: [diptych, {{ $role }}-worker]
      args: [--config, /etc/diptych/config/diptych.toml]
      {{- end }}
      env:
        {{- include "diptych.environment" (dict "root" $root) | nindent 8 }}
        {{- if not $isRankHost }}
        - {name: DIPTYCH_WORKER_ID, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: DIPTYCH_ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- if and (eq $pool.accelerator.vendor "none") (not (hasKey $pool.settings "threads")) }}
        - {name: DIPTYCH_THREADS, valueFrom: {resourceFieldRef: {containerName: worker, resource: limits.cpu}}}
        {{- end }}
        {{- end }}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pool.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if not $isRankHost }}
      ports:
        - {name: control, containerPort: {{ int $ports.control }}, protocol: TCP}
        {{- if or (eq $role "decode") $settings.role_change }}
        - {name: kv, containerPort: {{ int $ports.kv }}, protocol: TCP}
        {{- end }}
        - {name: http, containerPort: {{ int $ports.http }}, protocol: TCP}
        - {name: lend, containerPort: {{ int $ports.lend }}, protocol: TCP}
        {{- if gt (int $pool.rankHosts) 1 }}
        - {name: ranks, containerPort: {{ int $ports.ranks }}, protocol: TCP}
        {{- end }}
      # Startup: the model is loaded. Readiness: routers may send work. Liveness: the engine loop makes progress.
      startupProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ ceil (divf (int $pool.startupSeconds) 5) | int }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ max 1 (ceil (divf (int $pool.livenessSeconds) 10) | int) }}
      {{- end }}
      {{- with include "diptych.preStop" (dict "root" $root "seconds" $pool.preStopSeconds) }}
      {{- . | nindent 6 }}
      {{- end }}
      resources:
        {{- $resources := mustDeepCopy $pool.resources }}
        {{- if and (ne $pool.accelerator.vendor "none") (gt (int $pool.accelerator.count) 0) }}
        {{- $limits := mustMerge (dict (include "diptych.acceleratorResource" $pool.accelerator) (include "diptych.devices" (dict "pool" $pool) | int)) ($resources.limits | default dict) }}
        {{- $_ := set $resources "limits" $limits }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- with $pool.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/diptych/config, readOnly: true}
        {{- include "diptych.modelMounts" (dict "root" $root "model" $model) | nindent 8 }}
        {{- with include "diptych.extraMounts" (dict "root" $root "spec" $pool) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "diptych.secretMounts" (dict "root" $root "role" $role) }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $pool.shm.enabled }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $pool.kvDisk.enabled }}
        - {name: kv-disk, mountPath: /var/lib/diptych/kv}
        {{- end }}
    {{- with $pool.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "diptych.volumes" (dict "root" $root "role" $role "models" (list $model) "config" $name "spec" $pool) | nindent 4 }}
    {{- if $pool.shm.enabled }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.shm.size | quote }}}
    {{- end }}
    {{- if $pool.kvDisk.enabled }}
    - name: kv-disk
      emptyDir: {sizeLimit: {{ printf "%dGi" (add1 (int $pool.kvDisk.gib)) }}}
    {{- end }}
{{- end }}
